"""The texts that `make test-mutations` replaces are still there."""

from __future__ import annotations

from tests.mutations.catalogue import MUTATIONS
from tests.support.launch import ROOT


def test_every_mutation_applies_to_the_code_as_it_is() -> None:
    assert [m.name for m in MUTATIONS if not m.applies(ROOT)] == []
    assert all(m.before != m.after for m in MUTATIONS)


def test_every_mutation_names_a_test_that_exists() -> None:
    for mutation in MUTATIONS:
        file, _, name = mutation.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), mutation.name
