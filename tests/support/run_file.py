"""`python FILE ARGUMENTS` in a process that has imported what the file needs.

launch.module("tests.support.run_file", FILE, ARGUMENTS...)
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
