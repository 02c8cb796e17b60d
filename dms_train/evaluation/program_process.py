"""Process that runs a program written by a model; `programs` starts it.

    python -I -B program_process.py SOURCE SECONDS BYTES [FUNCTION]

It limits its own processor time, memory and output before the program begins. With FUNCTION, the
arguments of that method of `Solution` are read from standard input, one JSON value a line.
"""

from __future__ import annotations

import json
import math
import resource
import sys

NOT_LIMITED = 77  # exit code if a limit cannot be set
_OUTPUT_BYTES = 16 << 20
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


def _limit(seconds: float, memory: int) -> None:
    """Set all limits, which the program cannot raise again.

    Raises:
        OSError, ValueError: The system refused a limit.
    """
    for limit, value in (
        (resource.RLIMIT_CPU, math.ceil(seconds)),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, _OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def main() -> None:
    """Run the program with limits on time, memory and output."""
    path, seconds, memory, *function = sys.argv[1:]
    with open(path, encoding="utf-8") as stream:
        source = stream.read()
    try:
        _limit(float(seconds), int(memory))
    except (OSError, ValueError):
        sys.exit(NOT_LIMITED)
    sys.setrecursionlimit(50_000)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(_IMPORTS, names)  # before the program, because the benchmark does the same
    exec(compile(source, "program", "exec"), names)
    if function:
        arguments = [json.loads(line) for line in sys.stdin if line.strip()]
        solution = names["Solution"]
        assert callable(solution)
        sys.stdout.write(json.dumps(getattr(solution(), function[0])(*arguments)))


if __name__ == "__main__":
    main()
