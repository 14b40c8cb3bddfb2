"""seccomp restricts which system calls a process may make. See seccomp(2).

A filter is a program for the kernel's packet filter (BPF), written here by hand for x86-64 and ARM64. Calls that are
not listed are allowed, except those newer than this list: they fail as unknown to the kernel.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

_INSTALL, _ALL_THREADS, _SECCOMP = 1, 1, {"x86_64": 317, "aarch64": 277}
PROCESSORS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _REFUSE, _UNKNOWN, _END = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
_NUMBER, _PROCESSOR, _ARGUMENTS = 0, 4, 16
"""Where the kernel puts the number of a call, the processor and the arguments, 8 bytes each."""
NEWEST = 451
"""The last call that this list covers. Programs can handle a missing newer one."""

Numbers = dict[str, tuple[int | None, int | None]]
"""The number of each call on x86-64 and on ARM64."""
REFUSED: Numbers = {
    # the network; without a socket there is nothing to connect or bind
    "socket": (41, 198), "socketpair": (53, 199),
    # programs
    "execve": (59, 221), "execveat": (322, 281),
    # other processes: their memory, files and priority; leaving the group that is killed at the end
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "migrate_pages": (256, 238), "move_pages": (279, 239), "setsid": (112, 157),
    "setpgid": (109, 154),
    # namespaces and mounts, which would restore rights
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # large kernel interfaces that have often been exploited, or that bypass this filter
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # memory that no limit covers, or that outlives the process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # what Landlock does not cover: owner, mode, attributes and times of a file; in old versions its length
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "truncate": (76, 45),
    "inotify_add_watch": (254, 27), "fanotify_init": (300, 262),
}  # fmt: skip
WRITES: Numbers = {
    "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
}  # fmt: skip
PROCESSES: Numbers = {
    "fork": (57, None), "vfork": (58, None), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "prctl": (157, 167),
}  # fmt: skip
BY_ARGUMENT: Numbers = {
    "open": (2, None), "openat": (257, 56), "openat2": (437, 437), "fcntl": (72, 25), "prlimit64": (302, 261),
    "clone": (56, 220), "clone3": (435, 435),
}  # fmt: skip
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SET_OWNERS = (8, 15)  # F_SETOWN, F_SETOWN_EX: would let the kernel send signals to another process
_THREAD = 0x10000  # CLONE_THREAD

Program = list[tuple[int, int, int, int]]
"""Instructions: the operation, how many to skip if it holds, how many if not, and its operand."""


def confined(processor: str, writes: bool) -> Program:
    """Leave only reading files, writing files if `writes`, own processes, time and memory."""
    own_process = [*_argument(0), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE)]
    owners = [*_argument(1), *_each([(_EQUAL, 0, 1, owner) for owner in _SET_OWNERS], _REFUSE)]
    program = _refuse(REFUSED, processor)
    program += _if_called("prlimit64", own_process, processor) + _if_called("fcntl", owners, processor)
    if not writes:
        program += _refuse(WRITES, processor)
        program += _if_called("openat2", [(_RETURN, 0, 0, _UNKNOWN)], processor)  # its flags cannot be seen
        for call, place in (("open", 1), ("openat", 2)):
            to_write = [*_argument(place), *_each([(_ANY_BIT, 0, 1, _TO_WRITE)], _REFUSE)]
            program += _if_called(call, to_write, processor)
    return _whole(program, processor)


def sealed(processor: str) -> Program:
    """Allow no new process, only threads, and no signals."""
    thread = [*_argument(0), (_ANY_BIT, 1, 0, _THREAD), (_RETURN, 0, 0, _REFUSE)]
    program = _refuse(PROCESSES, processor) + _if_called("clone", thread, processor)
    # C libraries use clone if there is no clone3. A filter cannot see the flags of clone3.
    return _whole(program + _if_called("clone3", [(_RETURN, 0, 0, _UNKNOWN)], processor), processor)


def install(program: Program) -> bool:
    """Install a filter for every system call of this process, for good. Returns False if that is impossible."""
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions))
    call, *arguments = (ctypes.c_long(one) for one in (_SECCOMP[platform.machine()], _INSTALL, _ALL_THREADS))
    return ctypes.CDLL(None).syscall(call, *arguments, described) == 0


def supported() -> bool:
    """Whether there are filters for this system and processor."""
    return sys.platform == "linux" and platform.machine() in PROCESSORS and sys.maxsize > 2**32


def _whole(program: Program, processor: str) -> Program:
    head = [
        (_LOAD, 0, 0, _PROCESSOR), (_EQUAL, 1, 0, PROCESSORS[processor]), (_RETURN, 0, 0, _END),
        (_LOAD, 0, 0, _NUMBER), (_GREATER, 0, 1, NEWEST), (_RETURN, 0, 0, _UNKNOWN),
    ]  # fmt: skip
    return [*head, *program, (_RETURN, 0, 0, _ALLOW)]


def _refuse(calls: Numbers, processor: str) -> Program:
    numbers = (_number(one, processor) for one in calls.values())
    return _each([(_EQUAL, 0, 1, number) for number in numbers if number is not None], _REFUSE)


def _each(tests: Program, verdict: int) -> Program:
    return [step for test in tests for step in (test, (_RETURN, 0, 0, verdict))]


def _if_called(name: str, steps: Program, processor: str) -> Program:
    """The instructions for one call. They then reload its number over the argument."""
    number = _number(BY_ARGUMENT[name], processor)
    if number is None:
        return []
    return [(_EQUAL, 0, len(steps) + 1, number), *steps, (_LOAD, 0, 0, _NUMBER)]


def _argument(place: int) -> Program:
    """The lower half of an argument. The kernel, too, reads no more of a flag, a command or a process."""
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * place)]


def _number(numbers: tuple[int | None, int | None], processor: str) -> int | None:
    return numbers[list(PROCESSORS).index(processor)]
