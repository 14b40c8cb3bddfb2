"""A PostgreSQL server for the tests: a data directory of its own, on loopback, run by someone who is not root."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def find_programs() -> Path | None:
    """The folder with `initdb` and `pg_ctl`; Debian keeps it off the path."""
    on_path = shutil.which("initdb")
    folders = [Path(on_path).parent] if on_path else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


@contextmanager
def running_server(programs: Path) -> Iterator[str]:
    """The server's URL while it runs."""
    data = Path(tempfile.mkdtemp(prefix="solera-postgres-"))
    identity = _somebody_else(data)

    def call(*command: str) -> None:
        subprocess.run(command, check=True, cwd=data, stdout=subprocess.DEVNULL, **identity)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories= -c fsync=off"
    control = (str(programs / "pg_ctl"), "-D", str(data / "db"), "-w", "-l", str(data / "log"))
    try:
        call(str(programs / "initdb"), "-D", str(data / "db"), "-U", "solera", "-A", "trust", "-E", "UTF8", "-N")
        call(*control, "-o", options, "start")
        try:
            yield f"postgresql+psycopg://solera@127.0.0.1:{port}/postgres"
        finally:
            call(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(data)


def _somebody_else(data: Path) -> dict[str, object]:
    """PostgreSQL refuses to be run by root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(data, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
