"""The mutations of `make test-mutations` apply to the code as it is."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.support.launch import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_and_leaves_valid_code(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    mutated = mutation.mutate(source)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))


def test_every_mutation_names_a_test_that_exists() -> None:
    files = sorted({mutation.test.partition("::")[0] for mutation in MUTATIONS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    command += ["-p", "no:cacheprovider", "--assert=plain"]  # no assertion runs
    listed = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True).stdout
    tests = set(listed.splitlines())
    tests |= {test.partition("[")[0] for test in tests}
    assert not [m.name for m in MUTATIONS if m.test not in tests], listed[-2000:]


def test_names_of_mutations_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
