"""Break the code in known ways, one at a time in a copy of the tree; the named test must fail.

python -m tests.mutations [--jobs N] [WORD ...]

With words, only the mutations whose name contains one of them run. The exit status is 1 if a test
fails without a mutation, passes with its mutation or cannot run, or if a pattern does not match
exactly once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.support.launch import ROOT

TIMEOUT = 600  # seconds for one test
CAUGHT = "caught"


class Ran(NamedTuple):
    """Result of a run of pytest."""

    passed: bool
    failed: bool  # a test failed, rather than that it could not run
    output: str


def copy_tree(target: Path) -> Path:
    """Copy the files of the working tree that git does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout
    for name in names.decode().split("\0"):
        source = ROOT / name
        if name and (source.is_symlink() or source.is_file()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)
    return target


def run(tree: Path, words: list[str]) -> Ran:
    """Run pytest with these arguments in a copy, against the code of that copy."""
    # without stored bytecode, which is compared by whole seconds
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    try:
        finished = subprocess.run(
            [*command, "-o", f"timeout={TIMEOUT}", *words],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT * len(words),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ran(passed=False, failed=False, output="no answer in time")
    output = finished.stdout + finished.stderr
    passed = finished.returncode == 0 and not re.search(r"\bskipped\b", finished.stdout)
    failed = finished.returncode == 1 and bool(re.search(r"\b\d+ failed\b", finished.stdout))
    return Ran(passed, failed, output)


def attempt(mutation: Mutation) -> str:
    """Try one mutation; return `caught`, or the reason why it was not."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        try:
            mutation.apply(tree)
        except (OSError, ValueError) as error:
            return f"does not apply: {error}"
        ran = run(tree, ["-x", mutation.test])
    if ran.failed:
        return CAUGHT
    if ran.passed:
        return "SURVIVED"
    return f"its test could not run:\n{ran.output[-3000:]}"


def unmutated(mutations: list[Mutation]) -> Ran:
    """Run all their tests without a mutation."""
    with tempfile.TemporaryDirectory() as folder:
        return run(copy_tree(Path(folder)), sorted({mutation.test for mutation in mutations}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not arguments.words or any(word in mutation.name for word in arguments.words)
    ]
    before = unmutated(chosen)
    if not before.passed:
        print(f"the tests do not pass without a mutation:\n{before.output[-6000:]}")
        return 1
    width = max(len(mutation.name) for mutation in chosen)
    missed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutation, result in zip(chosen, pool.map(attempt, chosen), strict=True):
            missed += result != CAUGHT
            print(f"{mutation.name:{width}}  {result:8}  {mutation.test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
