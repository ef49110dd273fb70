"""The system call filter (seccomp) of a process that only computes: unlisted calls fail with `EPERM`.

The process may read files, compute, sleep and exit. It may not open a file for writing, change a file, start a process
or a thread, execute a program, reach another process or a socket, or use calls of later kernels.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from typing import Final

from rollq.buffer.common.sealing.kernel import column, system_call

_ALLOWED: Final = {
    # open files, and facts about other files
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "preadv": (295, 69),
    "lseek": (8, 62), "close": (3, 57), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291),
    "stat": (4, None), "lstat": (6, None), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17), "getdents64": (217, 61), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "poll": (7, None), "ppoll": (271, 73), "select": (23, None),
    "pselect6": (270, 72),
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233),
    "brk": (12, 214),
    # time, locks, random numbers
    "futex": (202, 98), "sched_yield": (24, 124), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "restart_syscall": (219, 128), "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, None), "times": (100, 153), "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, None),
    "getrandom": (318, 278),
    # facts about this process and the machine
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156),
    "getrusage": (98, 165), "getrlimit": (97, 163), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "sysinfo": (99, 179), "uname": (63, 160),
    # its own signals, and exit
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigpending": (127, 136), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""The numbers, on x86_64 and aarch64, of calls that are allowed with any arguments."""
_OPEN: Final = ((2, None, 1), (257, 56, 2))
"""The numbers of `open` and `openat`, and the index of the flags among their arguments."""
_FCNTL: Final = (72, 25)
_PRLIMIT: Final = (302, 261)
_COPIES_AND_FLAGS: Final = (0, 1, 2, 3, 1030)
"""The commands of `fcntl` that copy a file descriptor or return its flags; other commands can send signals."""
_ARCHITECTURES: Final = (0xC000003E, 0xC00000B7)
_TO_READ: Final = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_TO_READ_TOO: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_LARGEFILE", 0)

_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_DENY: Final = 0x00050000 | errno.EPERM
_SET_FILTER: Final = 1
_ALL_THREADS: Final = 1
_Instruction = tuple[int, int, int, int]
"""The code, the number of instructions to skip if the comparison is true and if it is false, and a constant."""


def allow_only_computing() -> None:
    """Permanently put the filter on all of this process's threads. Raises `OSError`.

    Call `give_up_new_rights` first.
    """
    instructions = list(_filter(column()))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions))
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code))
    if system_call("seccomp", _SET_FILTER, _ALL_THREADS, ctypes.c_char_p(program)):
        raise OSError("seccomp: a thread has a different filter")


def _filter(machine: int) -> Iterator[_Instruction]:
    """The filter's program. Pure."""
    yield (_LOAD, 0, 0, _ARCHITECTURE_AT)
    yield (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine])
    yield (_RETURN, 0, 0, _KILL)
    yield (_LOAD, 0, 0, _NUMBER_AT)
    for numbers in _ALLOWED.values():
        if (number := numbers[machine]) is not None:
            yield from _rule(number, [(_RETURN, 0, 0, _ALLOW)])
    for *open_numbers, place in _OPEN:
        if (number := open_numbers[machine]) is not None:
            others = 0xFFFFFFFF & ~(_TO_READ | _TO_READ_TOO)
            yield from _rule(number, [_argument(place), (_IF_ANY_BIT, 1, 0, others), (_RETURN, 0, 0, _ALLOW)])
    yield from _rule(_FCNTL[machine], [_argument(1), *_one_of(_COPIES_AND_FLAGS)])
    yield from _rule(_PRLIMIT[machine], [_argument(0), *_one_of((0,))])
    yield (_RETURN, 0, 0, _DENY)


def _rule(number: int, body: list[_Instruction]) -> Iterator[_Instruction]:
    """The instructions for one call: it is denied if the body ends without allowing it."""
    yield (_IF_EQUAL, 0, len(body) + 1, number)
    yield from body
    yield (_RETURN, 0, 0, _DENY)


def _argument(place: int) -> _Instruction:
    """Load the lower half of an argument, the only part of an int that the kernel reads."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * place)


def _one_of(values: tuple[int, ...]) -> Iterator[_Instruction]:
    for value in values:
        yield (_IF_EQUAL, 0, 1, value)
        yield (_RETURN, 0, 0, _ALLOW)
