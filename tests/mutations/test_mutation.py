"""Patterns of mutations match syntax, not text."""

from __future__ import annotations

import pytest

from tests.mutations.mutation import Mutation


def mutate(source: str, pattern: str, replacement: str, inside: str = "") -> str:
    return Mutation("a mistake", "code.py", pattern, replacement, "", inside).mutate(source)


@pytest.mark.parametrize(
    "source",
    [
        "score = rank(values, top=options.top)",
        "s = rank(\n    v,\n    top=o.top,\n)",
        "s = rank(v, top=x.y.top)",
    ],
)
def test_layout_and_local_names_do_not_matter(source: str) -> None:
    mutated = mutate(source, "rank($VALUES, top=$OPTIONS.top)", "rank($VALUES, top=1)")
    assert mutated.endswith(", top=1)")


@pytest.mark.parametrize(
    ("arguments", "rest"),
    [
        ("(top=o.top)", "()"),
        ("(v, top=o.top)", "(v, )"),
        ("(top=o.top, seed=s)", "(seed=s)"),
        ("(v, w, top=o.top, seed=s)", "(v, w, seed=s)"),
    ],
)
def test_an_argument_is_removed_wherever_it_stands(arguments: str, rest: str) -> None:
    pattern = "rank($$$HEAD, top=$OPTIONS.top, $$$TAIL)"
    assert mutate("rank" + arguments, pattern, "rank($$$HEAD, $$$TAIL)") == "rank" + rest


def test_statements_keep_their_indentation() -> None:
    source = 'def é():\n    for n in ("a", "b"):\n        f(n)\n        g(n)\n    return 1\n'
    mutated = mutate(
        source, 'for $N in ("a", "b"):\n    $$$BODY', 'for $N in ("a",):\n    $$$BODY\n    h()'
    )
    assert mutated == (
        'def é():\n    for n in ("a",):\n        f(n)\n        g(n)\n        h()\n    return 1\n'
    )


@pytest.mark.parametrize("source", ["a > b", "a - c >= b", "a + c >= b\nd + e >= f"])
def test_a_pattern_that_does_not_match_once_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"matches \d nodes of code\.py, not one"):
        mutate(source, "$A + $B >= $C", "$A")


def test_a_search_is_limited_to_one_function() -> None:
    source = "def first(n):\n    return n + 1\ndef second(n):\n    return n + 1\n"
    mutated = mutate(source, "$N + 1", "$N + 2", inside="second")
    assert mutated == "def first(n):\n    return n + 1\ndef second(n):\n    return n + 2\n"
