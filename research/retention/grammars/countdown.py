"""Lines of Countdown's searches, which `research/data/countdown.py` describes.

The first move of a search, its number, and every move below it with that number are lines of
`#k a op b = c : numbers left`. With five numbers there are two levels below a first move, which
count as one type.
"""

from __future__ import annotations

from research.retention.grammars.base import MARKER, Field, Grammar, Line

_NUMBER, _OPERATOR = r"\d+", r"[-+*/]"


def _marker(word: str) -> Field:
    return Field({word: MARKER})


def _move(name: str) -> tuple[Field, ...]:
    """Return the fields of `#k a op b = c : numbers left`."""
    number, operator = (
        Field({_NUMBER: f"{name} a op b = c"}),
        Field({_OPERATOR: f"{name} a op b = c"}),
    )
    return (
        Field({r"#\d+": f"{name} #k"}),
        *(number, operator, number, _marker("="), number, _marker(":")),
        Field({_NUMBER: f"{name}: numbers left"}, repeats=True),
    )


GRAMMAR = Grammar(
    (
        Line(
            (
                _marker("P"),
                Field({_NUMBER: "prompt numbers"}, repeats=True),
                _marker("T"),
                Field({_NUMBER: "target"}),
            )
        ),
        Line((_marker("R"), *_move("first move"))),
        Line(_move("later move")),
        Line(
            (_marker(">"), Field({_NUMBER: "last results", r"\.": MARKER}, repeats=True)),
            continues=True,
        ),
        Line((_marker("!"),), continues=True),
        Line(
            (
                _marker("ANS"),
                Field({f"{_NUMBER}|{_OPERATOR}": "answer", ",": MARKER}, repeats=True),
            )
        ),
        Line((_marker("<eod>"),), continues=True),
    )
)
