"""A sandbox for untrusted code that uses only the Linux kernel: no root, no helper program.

`confine` takes rights away from this process and everything it starts later: files, network, programs, capabilities.
`seal` then forbids new processes and signals. Neither can be undone. Each returns the protections that are missing
here, in words, and never fails because of them: the caller decides whether to warn or to stop.

A process that forks a child for each job calls `confine` once in itself, and `seal` in every child:

    missing = confine(python_files())
    if not os.fork():
        seal()
        exec(code)

Call both while the process has one thread. Landlock does not apply to threads that exist already.
"""

import ctypes
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from solera.tasks.sandbox import landlock, seccomp

SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/localtime",
    "/etc/ld.so.cache", "/sys/devices/system/cpu", "/dev/null", "/dev/zero", "/dev/urandom",
)  # fmt: skip
"""Files that shared libraries and Python's modules read on any machine."""
KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONHOME")
"""Environment variables that Python may need. No other is passed on, because they may hold tokens and passwords."""
_NO_NEW_PRIVILEGES, _PARENT_DEATH_SIGNAL, _KILL = 38, 1, 9
_CAPABILITIES, _READ_ANY_FILE = 0x20080522, 1 << 2  # version 3 of the interface; CAP_DAC_READ_SEARCH


def environment(**more: str) -> dict[str, str]:
    """The environment for a sandboxed process: what Python needs, and `more`. Linear algebra uses one thread, because a
    forked process has only one."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return kept | {"HOME": "/nonexistent", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | more


def python_files() -> set[Path]:
    """Files and folders that Python reads: its library, its packages, and the package of every loaded module.

    Folders of `sys.path` without installed packages, such as the folder of the user's project, are left out.
    """
    installed = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    packages = (entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages", "lib-dynload"))
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    found = {Path(place) for place in (*SYSTEM, *installed, *packages, *libraries, f"{sys.base_prefix}/lib") if place}
    for name, module in list(sys.modules.items()):
        if "." not in name:
            found.update(map(Path, getattr(module, "__path__", None) or filter(None, [_file(module)])))
    return {place for place in found if os.access(place, os.R_OK)}


def _file(module: object) -> str | None:
    place = getattr(module, "__file__", None)
    return place if isinstance(place, str) else None


def confine(readable: Iterable[Path], scratch: Path | None = None) -> list[str]:
    """Restrict this process and everything it starts: it reads only `readable`, writes only into `scratch`, opens no
    socket, runs no program, gains no rights and changes no process except its children.

    Without `scratch` it writes nothing. In `scratch`, the mode, owner and times of a file cannot be changed.
    """
    missing = []
    if not _no_new_privileges() or not _drop_capabilities():
        missing.append("privileges cannot be dropped, so an answer runs with all of yours")
    if not landlock.restrict(readable, scratch):
        missing.append("the kernel has no Landlock, so an answer can read your files")
    if not (seccomp.supported() and seccomp.install(seccomp.confined(platform.machine(), scratch is not None))):
        missing.append("the kernel or processor has no seccomp, so an answer can use the network, programs and files")
    return missing


def seal() -> list[str]:
    """Forbid new processes and all signals; threads are allowed. The process dies with its parent."""
    _control(_PARENT_DEATH_SIGNAL, _KILL)
    installed = seccomp.supported() and seccomp.install(seccomp.sealed(platform.machine()))
    if installed:
        return []
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # applies to every user but root
    return ["the kernel or processor has no seccomp, so an answer can start processes"]


def _no_new_privileges() -> bool:
    return _control(_NO_NEW_PRIVILEGES, 1)


def _control(option: int, value: int) -> bool:
    """prctl(2), if available."""
    control = getattr(ctypes.CDLL(None), "prctl", None)
    zero = ctypes.c_ulong(0)
    return control is not None and control(option, ctypes.c_ulong(value), zero, zero, zero) == 0


def _drop_capabilities() -> bool:
    """Root loses its powers, except for reading files of other users, who may own the packages."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "capset"):
        return False
    header = struct.pack("Ii", _CAPABILITIES, 0)
    held = ctypes.create_string_buffer(24)  # effective, permitted, inheritable; first the lower 32 bits, then the upper
    if libc.capget(ctypes.create_string_buffer(header), held) != 0:
        return False
    kept = struct.unpack("6I", held.raw)[1] & _READ_ANY_FILE
    return libc.capset(ctypes.create_string_buffer(header), struct.pack("6I", kept, kept, 0, 0, 0, 0)) == 0
