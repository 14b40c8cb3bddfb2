"""Code in an answer: what it can do to files, processes, the network, and to the verdicts of other answers."""

import ast
import asyncio
import contextlib
import ctypes
import ctypes.util
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from solera.tasks.gym import could_be_code, gym
from solera.tasks.judges import NoVerdictError, judges
from solera.tasks.sandbox import seccomp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of parts of the Linux kernel")
ROOT = Path(__file__).parents[2]
PROBLEM = ("countdown", None, 7)


def ran(code: str, limit: int = 3) -> object:
    """What the code says, run as some graders run an answer."""
    return judges("tests.tasks.slow", "none").grade("hostile", ("run",), (textwrap.dedent(code),), True, limit)


def refused(code: str) -> str:
    with pytest.raises(NoVerdictError) as error:
        ran(code)
    return str(error.value)


def state(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in sorted([folder, *folder.rglob("*")])
    }


@pytest.fixture
def run_folder(tmp_path):
    """A folder such as a run's, and a link into it."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "store.db").write_text("rollouts")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    return tmp_path


FILES = [
    "os.system('rm -rf {0}')",
    "os.remove('{0}/run/store.db')",
    "open('{0}/run/store.db', 'w').close()",
    "open('{0}/link/store.db', 'a').write('x')",
    "open('{0}/new', 'x')",
    "os.truncate('{0}/run/store.db', 0)",
    "os.rename('{0}/run/store.db', '{0}/run/gone')",
    "os.replace('/dev/null', '{0}/run/store.db')",
    "os.chmod('{0}/run', 0)",
    "os.chown('{0}/run/store.db', 12345, 12345)",
    "os.utime('{0}/run/store.db', (0, 0))",
    "os.setxattr('{0}/run/store.db', 'user.x', b'y')",
    "os.rmdir('{0}/run/model')",
    "os.mkdir('{0}/run/other')",
    "os.symlink('/etc/passwd', '{0}/run/passwd')",
    "os.link('{0}/run/store.db', '{0}/run/again')",
    "os.mkfifo('{0}/run/pipe')",
    "os.mknod('{0}/run/node')",
    "__import__('shutil').rmtree('{0}/run')",
    "__import__('sqlite3').connect('{0}/run/store.db').execute('create table t (x)')",
    "__import__('tempfile').mkdtemp()",
    "open('/tmp/solera-was-here', 'w')",
    "open('/dev/shm/solera-was-here', 'w')",
    "open('solera-was-here', 'w')",
    "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory(create=True, size=9)",
    "open('{0}/run/store.db').read()",
    "os.listdir('{0}')",
    "open('/etc/passwd').read()",
    "os.listdir(os.path.expanduser('~'))",
    "os.listdir('/root')",
    "open(f'/proc/{{os.getppid()}}/environ').read()",
    "open(f'/proc/{{os.getppid()}}/mem', 'r+b')",
    "open('/proc/self/environ').read()",
    "open('/proc/self/root/etc/passwd').read()",
]


@pytest.mark.parametrize("code", FILES)
def test_no_file_is_written_or_read(run_folder, code):
    before = state(run_folder)
    with contextlib.suppress(NoVerdictError):
        said = ran(f"import os\nsaid = repr({code.format(run_folder)})")
        assert said != "0" and "os.system" in code  # the one call that returns an error instead of raising it
    assert state(run_folder) == before
    assert not any(Path(folder, "solera-was-here").exists() for folder in ("/tmp", "/dev/shm", "."))


def test_code_in_an_answer_to_countdown_does_nothing(run_folder):
    """What it did before: reasoning-gym gives the answer to sympy's parser, which evaluates it."""
    before = state(run_folder)
    for code in (
        f"__import__('os').system('rm -rf {run_folder}/run')",
        f"__import__('os').remove('{run_folder}/run/store.db')",
        f"open('{run_folder}/run/new','w').write('x')",
        "__import__('os').system('setsid sleep 600 >/dev/null 2>&1 &')",
        f"__import__('subprocess').Popen(['touch','{run_folder}/run/new'],start_new_session=True)",
        f"__import__('pathlib').Path('{run_folder}/run/store.db').write_text('')",
    ):
        assert asyncio.run(gym(f"<answer>{code}</answer>", PROBLEM, True)) < 0.1
    assert state(run_folder) == before


PROCESSES = [
    "os.fork()", "os.forkpty()", "os.posix_spawn('/bin/true', ['true'], {})", "os.execv('/bin/true', ['true'])",
    "__import__('subprocess').run(['true'])", "__import__('multiprocessing').Process(target=print).start()",
    "os.setsid()", "os.setpgid(0, 0)", "os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.kill(0, 9)",
    "os.killpg(os.getpgid(0), 9)", "os.kill(TRAINER, 9)", "os.kill(TRAINER, 0)", "os.pidfd_open(TRAINER)",
    "resource.prlimit(TRAINER, resource.RLIMIT_CPU, (1, 1))", "os.setpriority(os.PRIO_PROCESS, TRAINER, 19)",
    "os.sched_setaffinity(TRAINER, {0})", "__import__('fcntl').fcntl(0, 8, TRAINER)",
    "os.nice(-5)", "os.setuid(12345) if os.getuid() == 0 else 1 / 0", "os.chroot('/')", "os.memfd_create('x')",
]  # fmt: skip


@pytest.mark.parametrize("code", PROCESSES)
def test_no_process_is_begun_signalled_or_changed(code):
    before = [resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_CPU", "RLIMIT_NOFILE")]
    said = refused(f"import os, resource\nTRAINER = {os.getpid()}\n{code}")
    assert "PermissionError" in said or "ZeroDivisionError" in said, said
    assert [resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_CPU", "RLIMIT_NOFILE")] == before


DIRECT = {
    "x86_64": {"fork": 57, "vfork": 58, "clone": 56, "clone3": 435, "execve": 59, "socket": 41, "kill": 62,
               "ptrace": 101, "unlink": 87, "openat2": 437, "io_uring_setup": 425, "unshare": 272, "new": 467,
               "x32": 0x40000000 + 57},
    "aarch64": {"clone": 220, "clone3": 435, "execve": 221, "socket": 198, "kill": 129, "ptrace": 117, "unlinkat": 35,
                "openat2": 437, "io_uring_setup": 425, "unshare": 97, "new": 467},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DIRECT.get(os.uname().machine, {})))
def test_system_calls_past_the_c_library_are_refused(name):
    call = DIRECT[os.uname().machine][name]
    said = ran(f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        here = os.getpid()
        done = libc.syscall(ctypes.c_long({call}), *[ctypes.c_long(0)] * 6)
        said = [done, ctypes.get_errno(), os.getpid() == here]
    """)
    assert said in ([-1, 1, True], [-1, 38, True])  # EPERM, ENOSYS


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the other kind of system call of x86")
def test_system_calls_of_a_32_bit_program_end_the_process():
    said = refused("""
        import ctypes, mmap
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(bytes([0xB8, 2, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # mov eax, 2 (fork); int 0x80; ret
        said = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    """)
    assert "died" in said


def test_threads_are_allowed():
    assert ran("""
        import threading
        said = []
        threads = [threading.Thread(target=said.append, args=(1,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    """) == [1, 1, 1, 1]


def test_no_socket_reaches_a_server(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = []
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(tmp_path / "s")),
            (socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{tmp_path}"),
        ):
            server = stack.enter_context(socket.socket(family, kind))
            server.bind(address)
            server.setblocking(False)
            if kind == socket.SOCK_STREAM:
                server.listen()
            servers.append((server, family, kind, server.getsockname()))
        for server, family, kind, address in servers:
            assert "PermissionError" in refused(f"""
                import socket
                client = socket.socket({int(family)}, {int(kind)})
                client.connect({address!r})
                client.send(b"secret")
            """)
            with pytest.raises(BlockingIOError):
                server.accept() if kind == socket.SOCK_STREAM else server.recv(99)
    for code in ("socket.socketpair()", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"):
        assert "PermissionError" in refused(f"import socket\n{code}")


def test_no_secret_is_in_the_environment_and_no_file_is_open(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    monkeypatch.setenv("PGPASSWORD", "secret-password")
    court = judges("tests.tasks.slow", "other processes than those of the other tests")
    code = """
        import os, resource
        said = [dict(os.environ), []]
        for file in range(256):
            try:
                os.fstat(file)
                said[1].append(file)
            except OSError:
                pass
    """
    variables, files = court.grade("hostile", ("run",), (textwrap.dedent(code),), True)
    assert not {name for name in variables if "TOKEN" in name or "PASS" in name or "KEY" in name}
    assert not any("secret" in value for value in variables.values())
    assert files == [0, 1, 2, 3]  # questions, nothing, nothing, replies


def test_memory_and_files_are_limited():
    for code in ("'a' * 10**10", "bytearray(5 * 2**30)", "__import__('mmap').mmap(-1, 10**10)"):
        assert "Memory" in (said := refused(code)) or "allocate" in said
    assert "Too many open files" in refused("import os\nwhile True: os.pipe()")


WAITING = """
import os, threading, time, builtins, sys
def wait():
    while True:
        for file in range(4):
            try:
                os.write(file, b'{"value": 1.0}')
            except OSError:
                pass
        time.sleep(0.01)
threading.Thread(target=wait).start()
sys.modules["tests.tasks.slow"].double = lambda number: "changed"
builtins.int = builtins.len = None
"""


def test_code_in_one_answer_does_not_touch_the_next():
    court = judges("tests.tasks.slow", "none")
    for _ in range(8):
        with contextlib.suppress(NoVerdictError):
            ran(WAITING)
        assert court.grade("hostile", ("double",), (21,), False) == 42
        assert court.ask("double", 4) == 8


@pytest.mark.parametrize("value", ['"text"', "null", "[]", "1" + "0" * 400, "NaN", "1e999", "true", "-3.0"])
def test_a_verdict_that_code_has_forged_about_itself_does_not_stop_the_run(value):
    """Code that runs where the grader runs can find out how a verdict is written. It gets no more than a number."""
    forging = f"""
import os, sys, time
frame = sys._getframe()
while frame.f_code.co_name != "_grade":
    frame = frame.f_back
os.write(3, frame.f_locals["line"][:16] + b'{{"value": {value}}}' + bytes([10]))
time.sleep(9)
"""
    text = f"<answer>exec({forging!r})</answer>"
    assert asyncio.run(gym(text, PROBLEM, True)) == 0.0
    one = f"<answer>exec({forging.replace(value, '1.0')!r})</answer>"
    assert asyncio.run(gym(one, PROBLEM, True)) == 1.0  # the limit that docs/tasks.md states


def test_processes_end_with_the_one_that_asked(tmp_path):
    program = """
import threading, time
from pathlib import Path
from solera.tasks.judges import judges

def children(process):
    files = [task / "children" for task in Path(f"/proc/{process}/task").iterdir()]
    return [int(one) for file in files for one in file.read_text().split()]

question = ("hostile", ("run",), ("import time; time.sleep(600)",), True, 60)
threading.Thread(target=judges("tests.tasks.slow", "none").grade, args=question).start()
while not (graders := [child for judge in children("self") for child in children(judge)]):
    time.sleep(0.1)
print(*children("self"), *graders, flush=True)
time.sleep(600)
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert trainer.stdout is not None
    with trainer.stdout:
        pids = [int(one) for one in trainer.stdout.readline().split()]
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert len(pids) == 2
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


LIMITED = """
import ctypes, os, struct, sys, platform
refused = [int(one) for one in sys.argv[1].split()]
steps = [(0x20, 0, 0, 0)] + [step for one in refused for step in ((0x15, 0, 1, one), (6, 0, 0, 0x50000 | 38))]
steps += [(6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
libc = ctypes.CDLL(None)
libc.prctl(38, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3)
filter = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
assert libc.prctl(22, ctypes.c_ulong(2), filter, *[ctypes.c_ulong(0)] * 2) == 0
"""
"""A kernel that lacks some system calls: a filter before them answers as a kernel does that has never heard of them."""
GRADED = """
import asyncio, os
from solera.tasks.gym import gym
from solera.tasks.judges import judges
print([asyncio.run(gym(f"<answer>{answer}</answer>", ("countdown", None, 7), True)) for answer in
       ("1", f"open('{sys.argv[2]}','w').write('x')", "os.fork()")])
print(judges("tests.tasks.slow", "none").ask("double", 21))
"""
LANDLOCK, SECCOMP = "444 445 446", {"x86_64": "317", "aarch64": "277"}.get(os.uname().machine, "")


@pytest.mark.parametrize(
    ("absent", "says", "written"),
    [("", [], False), (LANDLOCK, ["no Landlock"], False), (SECCOMP, ["no seccomp"], False),
     (f"{LANDLOCK} {SECCOMP}", ["no Landlock", "no seccomp"], True)],
)  # fmt: skip
def test_on_a_kernel_without_the_means_grading_goes_on_with_one_warning(tmp_path, absent, says, written):
    target = tmp_path / "written"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED + GRADED, absent, str(target)], capture_output=True, text=True, check=False,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    scores, double = done.stdout.splitlines()
    assert all(score < 0.1 for score in ast.literal_eval(scores)) and double == "42"
    warnings = [line for line in done.stderr.splitlines() if "sandbox" in line]
    assert len(warnings) == bool(says)
    assert all(part in warnings[0] for part in says)
    assert target.exists() == written
    assert not target.exists() or target.stat().st_size == 0  # no byte can be written even there (RLIMIT_FSIZE)


NOBODY = """
import os, pathlib, socket, sys
import solera.tasks.sandbox as sandbox
scratch, outside = map(pathlib.Path, sys.argv[1:])
readable = sandbox.python_files()
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(sandbox.confine(readable, scratch), sandbox.seal())
(scratch / "file").write_text("in the scratch folder")
(scratch / "folder").mkdir()
(scratch / "file").rename(scratch / "folder" / "file")
(scratch / "out").symlink_to(outside)
attempts = [
    lambda: (outside / "file").write_text("x"), lambda: (scratch / "out" / "file").write_text("x"),
    lambda: (scratch / "folder" / "file").rename(outside / "file"),
    lambda: os.link(scratch / "folder" / "file", outside / "f"),
    lambda: (scratch / ".." / outside.name / "file").write_text("x"), lambda: (outside / "there").read_text(),
    lambda: (outside / "there").unlink(), lambda: os.mkfifo(scratch / "pipe"), lambda: os.fork(), socket.socket,
    lambda: os.kill(os.getppid(), 0), lambda: os.execv("/bin/true", ["true"]), lambda: os.chmod(outside, 0),
]
for number, attempt in enumerate(attempts):
    try:
        attempt()
        print("allowed", number)
    except OSError as error:
        assert error.errno in (1, 13, 18), error  # EPERM, EACCES, EXDEV
(scratch / "folder" / "file").unlink()
"""


@pytest.fixture
def open_to_all():
    """A folder that other users may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_plain_user_is_protected_too_and_a_scratch_folder_can_be_written(open_to_all):
    scratch, outside = open_to_all / "scratch", open_to_all / "outside"
    for folder in (scratch, outside):
        folder.mkdir()
        folder.chmod(0o777)
    (outside / "there").write_text("secret")
    done = subprocess.run(
        [sys.executable, "-c", NOBODY, str(scratch), str(outside)], capture_output=True, text=True, check=False,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "[] []\n" and not done.stderr, done.stdout + done.stderr
    assert [path.name for path in outside.iterdir()] == ["there"]


CODE = [
    "exit()", "__import__('os')", "open ('x')", "[open][0]('x')", "(lambda: 0)()", "3 + f(2)", "x.y", "''.join(x)",
    "a[b]", "{a: b}", "f'{x}'", "(exit)()", "exit\n()", "eval('1')", "@f", "\\u0028", "x . y", "ｅｘｉｔ()", "1 .real",
    "print(1)", "sin(x)", "lambda:(0)", "2 if f() else 3", "`x`", "1..real", "5.bit_length()",
]  # fmt: skip
HARMLESS = ["", "12", "-3.5", "(3 + 4) * 2 - (1)", "((1+2)*3)", "A is a knave, and B is a knight.", "1 2 3\n4 5 6",
            "_ Q _ _\nQ _ _ _", "x^2 + 3*x - 1", "50%", "5!", "10 > 3", "a, b, c", "12:30", "$5.00"]  # fmt: skip


def test_what_could_be_code_is_known():
    assert [answer for answer in CODE if not could_be_code(answer)] == []
    assert [answer for answer in HARMLESS if could_be_code(answer)] == []


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_python_finds_no_call_in_what_is_called_harmless():
    rng, parsed = random.Random(0), 0
    pieces = [*"()[]{}.,:;+-*/%<>=!|&~^@'\"`# \n_", "exit", "x", "y1", "7", "3.5", "lambda", "for", "in", "if", "else",
              "not", "**", "==", ":="]  # fmt: skip
    for _ in range(60_000):
        text = "".join(rng.choices(pieces, k=rng.randint(2, 7)))
        if not could_be_code(text):
            with contextlib.suppress(SyntaxError):
                nodes = list(ast.walk(ast.parse(text.strip())))
                parsed += len(nodes) > 4
                bad = (ast.Call, ast.Attribute, ast.Subscript, ast.JoinedStr, ast.Import, ast.FunctionDef)
                assert not any(isinstance(node, bad) for node in nodes), text
    assert parsed > 50


@pytest.mark.parametrize(("place", "token"), [(0, 0xC000003E), (1, 0xC00000B7)])
def test_the_numbers_of_system_calls_are_those_of_libseccomp(place, token):
    """Another implementation, which Debian's package manager needs."""
    library = ctypes.util.find_library("seccomp")
    if library is None:
        pytest.skip("libseccomp is not installed")
    resolve = ctypes.CDLL(library).seccomp_syscall_resolve_name_arch
    listed = seccomp.REFUSED | seccomp.WRITES | seccomp.PROCESSES | seccomp.BY_ARGUMENT
    numbers = {name: resolve(ctypes.c_uint32(token), name.encode()) for name in listed}
    assert {name: max(number, -1) for name, number in numbers.items()} == {
        name: -1 if found[place] is None else found[place] for name, found in listed.items()
    }


def verdict(program, processor: int, number: int, *arguments: int) -> int:
    """What the kernel's packet filter does with a system call, for the five instructions that are used."""
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, processor, 0, *(*arguments, *[0] * 6)[:6])
    at, loaded = 0, 0
    while True:
        code, yes, no, value = program[at]
        if code == 0x06:
            return value
        if code == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
            at += 1
        else:
            holds = {0x15: loaded == value, 0x25: loaded > value, 0x45: bool(loaded & value)}[code]
            at += 1 + (yes if holds else no)


@pytest.mark.parametrize(
    ("name", "token", "clone", "openat", "socket_", "read", "fcntl", "prlimit"),
    [("x86_64", 0xC000003E, 56, 257, 41, 0, 72, 302), ("aarch64", 0xC00000B7, 220, 56, 198, 63, 25, 261)],
)
def test_the_filters_of_both_processors(name, token, clone, openat, socket_, read, fcntl, prlimit):
    """Tests run on one processor. Numbers are from the kernel's tables, verdicts from seccomp(2)."""
    allow, refuse, unknown, end = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
    thread = 0x3D0F00  # what glibc's pthread_create asks for
    sealed, confined, writing = seccomp.sealed(name), seccomp.confined(name, False), seccomp.confined(name, True)
    assert [verdict(sealed, token, *call) for call in [(clone, thread), (clone, 17), (clone, 0x10000000), (435,)]] == [
        allow, refuse, refuse, unknown]  # fmt: skip
    assert [verdict(confined, token, openat, 0, 0, flags) for flags in (0, 0o2000000, 1, 2, 0o100, 0o1000)] == [
        allow, allow, refuse, refuse, refuse, refuse]  # fmt: skip
    assert [verdict(writing, token, openat, 0, 0, 0o101), verdict(writing, token, socket_)] == [allow, refuse]
    assert [verdict(confined, token, fcntl, 5, command) for command in (1, 4, 8, 15)] == [allow, allow, refuse, refuse]
    assert [verdict(confined, token, prlimit, process) for process in (0, 1, 4242)] == [allow, refuse, refuse]
    for program in (sealed, confined, writing):
        assert [verdict(program, token, number) for number in (read, 500, 0x40000000 + read, -1)] == [
            allow, unknown, unknown, unknown]  # fmt: skip
        assert verdict(program, 0x40000003, read) == end  # a 32-bit program's
