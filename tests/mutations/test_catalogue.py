"""The mutations of `make test-mutations` apply to the code as it is."""

from __future__ import annotations

import ast

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
    for mutation in MUTATIONS:
        file, _, name = mutation.test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name.partition("[")[0] in tests, mutation.name


def test_names_of_mutations_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
