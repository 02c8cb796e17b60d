"""A process that runs a program which a model wrote; `programs` starts it.

    python -I -B program_process.py SOURCE SECONDS BYTES [FUNCTION]

It limits itself before the program begins: processor time, memory, size of its output, and by a
seccomp filter of Linux everything that opens a file to write, changes a folder, uses the network,
starts or signals a process. A filter cannot be taken back. Files may be read. With FUNCTION, the
arguments of that method of `Solution` are read from standard input, one JSON value a line.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import resource
import struct
import sys

NOT_ISOLATED = 77  # exit code where a limit cannot be set
_OUTPUT_BYTES = 16 << 20
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ARCH_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_OPEN, _CLONE, _OPENAT, _PRLIMIT = 2, 56, 257, 302  # may be called with some arguments
_CLONE_THREAD = 0x10000
_WRITING = 0x1 | 0x2 | 0x40 | 0x200  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
# System calls of x86-64 by what they are for.
_ABSENT = (435, 437)  # clone3, openat2: the C library then uses clone and openat
_DENIED = (
    *(41, 42, 43, 44, 46, 49, 50, 53, 288),  # sockets
    *(57, 58, 59, 322, 62, 129, 200, 234, 297, 424, 434),  # processes and signals
    *(
        76,
        77,
        82,
        83,
        84,
        85,
        86,
        87,
        88,
        90,
        91,
        92,
        93,
        94,
        132,
        133,
        188,
        189,
        190,
        197,
        198,
        199,
    ),
    *(235, 258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 316, 452),  # files and folders
    *(101, 135, 310, 311, 312, 438),  # other processes' memory
    *(153, 155, 159, 161, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172, 173, 175, 176, 227),
    *(246, 248, 249, 250, 272, 298, 308, 313, 319, 320, 321, 323, 425, 426, 427),  # the system
    *(428, 429, 430, 431, 432, 433, 442),
    *(29, 64, 68, 160, 240),  # shared memory, queues, limits
)
_IMPORTS = """\
import sys, math, re, random, string, itertools, functools, collections, heapq, bisect
import operator, copy
from typing import *
from math import *
from itertools import *
from functools import *
from collections import *
from heapq import *
from bisect import *
"""


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _refuse(number: int) -> bytes:
    return _instruction(_RETURN, _ERROR | number)


def _filter() -> bytes:
    """The seccomp filter as BPF instructions."""
    load_number = _instruction(_LOAD, _NUMBER)
    parts = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, _ARCH_X86_64, 1, 0),
        _instruction(_RETURN, _KILL),
        load_number,
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _KILL),
    ]
    for number in _DENIED:
        parts += [_instruction(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    for number in _ABSENT:
        parts += [_instruction(_EQUAL, number, 0, 1), _refuse(errno.ENOSYS)]
    for number, argument in ((_OPEN, 1), (_OPENAT, 2)):
        parts += [
            _instruction(_EQUAL, number, 0, 4),
            _instruction(_LOAD, _ARGUMENTS + 8 * argument),
            _instruction(_ANY_BIT, _WRITING, 0, 1),
            _refuse(errno.EACCES),
            _instruction(_RETURN, _ALLOW),
        ]
    parts += [
        _instruction(_EQUAL, _CLONE, 0, 4),
        _instruction(_LOAD, _ARGUMENTS),
        _instruction(_ANY_BIT, _CLONE_THREAD, 1, 0),
        _refuse(errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_EQUAL, _PRLIMIT, 0, 6),  # may ask for limits, not set them
        _instruction(_LOAD, _ARGUMENTS + 16),
        _instruction(_EQUAL, 0, 0, 2),
        _instruction(_LOAD, _ARGUMENTS + 20),
        _instruction(_EQUAL, 0, 1, 0),
        _refuse(errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(parts)


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _isolate(seconds: float, memory: int) -> None:
    """Set all limits; raises OSError or ValueError where that is not possible."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError("Linux on x86-64 is needed")
    cpu = math.ceil(seconds)
    for limit, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, _OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    library = ctypes.CDLL(None, use_errno=True)
    code = _filter()
    program = _Program(len(code) // 8, code)
    done = (
        library.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0),
        library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        library.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    )
    if any(done):
        raise OSError(ctypes.get_errno(), "seccomp")


def main() -> None:
    """Entry point."""
    path, seconds, memory, *function = sys.argv[1:]
    with open(path, encoding="utf-8") as stream:
        source = stream.read()
    try:
        _isolate(float(seconds), int(memory))
    except (OSError, ValueError):
        sys.exit(NOT_ISOLATED)
    sys.setrecursionlimit(50_000)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(_IMPORTS, names)  # before the program, as the benchmark does
    exec(compile(source, "program", "exec"), names)
    if function:
        arguments = [json.loads(line) for line in sys.stdin if line.strip()]
        solution = names["Solution"]
        assert callable(solution)
        sys.stdout.write(json.dumps(getattr(solution(), function[0])(*arguments)))


if __name__ == "__main__":
    main()
