"""Word problems of arithmetic for the text of a retrofit; this project's own text."""

from __future__ import annotations

import random

_NAMES = (
    *("Ada", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Kira"),
    *("Leo", "Maria", "Nadia", "Omar", "Paula", "Quentin", "Rosa", "Samir", "Tara", "Victor"),
)
_THINGS = (
    *("beads", "bottles", "bowls", "boxes of crayons", "buttons", "candles", "cards", "chairs"),
    *("cups", "kites", "lamps", "marbles", "notebooks", "paper boats", "pencils", "postcards"),
    *("ribbons", "shirts", "spoons", "stickers", "tickets", "toy cars", "vases"),
)
_PROBLEMS = (
    "{name} has {few} boxes with {many} {things} in each, and gives {less} of the {things} to "
    "{friend}. How many {things} does {name} have left?",
    "{name} buys {few} {things} for {some} dollars each and pays with {large} dollars. How many "
    "dollars does {name} get back?",
    "A book has {large} pages. {name} reads {few} pages on each of {some} days, and {less} pages "
    "on the next day. How many pages are left?",
    "A train travels {many} kilometers an hour for {few} hours, and then {less} kilometers an "
    "hour faster for {some} hours. How many kilometers does it travel?",
    "{name} works {few} hours on each of {some} days, for {many} dollars an hour, and spends "
    "{less} dollars on {things}. How many dollars are left?",
    "{name} has {large} dollars and saves {few} dollars every week. {friend} has {many} dollars "
    "and saves twice as much every week. How many dollars do they have together after {less} "
    "weeks?",
    "A portion of soup needs {many} grams of rice, {less} grams of salt and {some} eggs. How "
    "many grams of rice and salt together do {few} portions need?",
    "{name} is {few} years older than {friend}. {friend} is twice as old as {third}, who is "
    "{less}. How old are the three together?",
    "A farm has {few} fields with {many} rows of {less} trees each, and {large} trees near the "
    "house. How many trees does it have?",
    "A machine makes {many} {things} in an hour, of which 2 are broken. How many good {things} do "
    "{few} machines make in {some} hours?",
    "{name} sold {many} {things} in May and half as many {things} in June. In July {friend} sold "
    "{few} times as many as {name} in May. How many {things} did they sell in the three months?",
    "{few} friends buy a ticket for {large} dollars each, and {name} pays {less} dollars for the "
    "parking. How many dollars do the tickets and the parking cost together?",
)
_NUMBERS = {  # every answer is above 0
    "few": range(2, 10),
    "some": range(2, 10),
    "less": range(2, 21),
    "many": range(12, 61, 2),
    "large": range(110, 901, 5),
}


def word_problems(number: int, seed: int) -> list[str]:
    """Return different problems, drawn with a seed."""
    draw = random.Random(seed)
    drawn: dict[str, None] = {}
    while len(drawn) < number:
        name, friend, third = draw.sample(_NAMES, 3)
        numbers = {key: draw.choice(values) for key, values in _NUMBERS.items()}
        words = {"name": name, "friend": friend, "third": third, "things": draw.choice(_THINGS)}
        drawn[draw.choice(_PROBLEMS).format(**numbers, **words)] = None
    return list(drawn)
