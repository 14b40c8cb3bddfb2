"""Landlock restricts which files a process may open, from Linux 5.13 on. See landlock(7)."""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every processor
_ASK_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_OF_A_FILE = _WRITE_FILE | _READ_FILE | _TRUNCATE
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file rights in each version of Landlock. Later versions have as many as the fifth."""
_NETWORK_SINCE, _SCOPES_SINCE = 4, 6
_EXECUTE, _SPECIAL_FILES, _DEVICES = 1 << 0, 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11, 1 << 15
_NEVER = _EXECUTE | _SPECIAL_FILES | _DEVICES
"""Forbidden even in the scratch folder: programs, sockets, pipes, devices."""


def restrict(readable: Iterable[Path], scratch: Path | None) -> bool:
    """Remove the right to open any other file, to use TCP, and to signal processes outside. Returns False without
    Landlock."""
    version = _version()
    if version < 1:
        return False
    known = (1 << _RIGHTS.get(version, _RIGHTS[5])) - 1
    network = 0b11 if version >= _NETWORK_SINCE else 0  # bind, connect
    scopes = 0b11 if version >= _SCOPES_SINCE else 0  # abstract sockets, signals
    size = 24 if version >= _SCOPES_SINCE else 16 if version >= _NETWORK_SINCE else 8
    ruleset = _call(_CREATE_RULESET, struct.pack("QQQ", known, network, scopes), size, 0)
    if ruleset < 0:
        return False
    try:
        for place in filter(os.path.exists, readable):
            _allow(ruleset, place, _READ_FILE | _READ_DIR)
        if scratch is not None:
            _allow(ruleset, scratch, known & ~_NEVER)
            _allow(ruleset, Path(os.devnull), known & (_READ_FILE | _WRITE_FILE | _TRUNCATE))
        return _call(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _version() -> int:
    return _call(_CREATE_RULESET, None, 0, _ASK_VERSION) if sys.platform == "linux" else 0


def _allow(ruleset: int, place: Path, rights: int) -> None:
    beneath = os.open(place, os.O_PATH | os.O_CLOEXEC)
    try:
        if not place.is_dir():
            rights &= _OF_A_FILE
        if _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0) != 0:
            raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}", str(place))
    finally:
        os.close(beneath)


def _call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return libc.syscall(ctypes.c_long(number), *wide)
