"""Countdown: reach a target with all of some numbers, by a search that is written out.

A document is a prompt, a depth-first search and the answer, in words that are one token each
(`research.data.words`):

    P 4 1 4 3 T 44
    R #1 4 + 3 = 7 : 1 4 7
    #1 4 + 1 = 5 : 7 5 > 12 2 35 .
    ...
    R #2 4 * 3 = 12 : 1 4 12
    ...
    #2 12 - 1 = 11 : 11 4 > 15 7 44 !
    ANS 4 * 3 , 12 - 1 , 11 * 4 <eod>

First moves come in random order, each once, and are numbered; everything below a first move has a
fixed order. A line states the move, its result and the numbers that are left. When two are left,
their sum, difference, product and quotient follow, `.` for one that does not exist; `!` marks the
target and ends the search. Results are whole numbers from 1 to 100, and nothing is multiplied or
divided by 1.

A solver must remember the target, the line of the current first move, and the first moves that it
has tried. One instance in sixteen is held out by a hash of its numbers and target: no training
document has it, in any order of its numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.word_tokenizer import EOD
from dms_train.data.errors import DataError
from research.data.token_documents import Drawn, Tokens
from research.data.words import ID, LARGEST, MARK, MOST_MARKS, NUMBER, OPERATORS, decoded

Split = Literal["train", "held_out"]
State = tuple[int, ...]  # numbers, ascending

LARGEST_NUMBER = 20  # largest number in a prompt
TARGETS = range(10, 101)
MOST_FIRST_MOVES = MOST_MARKS

_STATES = 1 << 18  # more than there are states of three numbers
_BLOCKS = 1 << 15  # about 10 KB each
_TRIES = 100_000  # largest number of draws for one instance


class Move(NamedTuple):
    """`left operator right = result`, the larger number on the left."""

    left: int
    operator: str
    right: int
    result: int

    @property
    def words(self) -> tuple[str, str, str]:
        """Words of the move without its result."""
        return str(self.left), self.operator, str(self.right)


class Instance(NamedTuple):
    """Numbers and the target that all of them must give.

    Attributes:
        numbers: Numbers in the order of the prompt.
        target: Result that all of them must give.
    """

    numbers: State
    target: int

    @property
    def held_out(self) -> bool:
        """True if no training document has these numbers with this target."""
        key = f"{','.join(map(str, sorted(self.numbers)))}:{self.target}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 16 == 0

    @property
    def prompt(self) -> str:
        """Prompt of a search."""
        return f"P {' '.join(map(str, self.numbers))} T {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountdownRule:
    """Rule that decides which instances are drawn.

    Attributes:
        numbers: Numbers in a prompt.
        fewest_solving: Least number of first moves from which the target can be reached.
        most_solving: Most such first moves.
    """

    numbers: int = 4
    fewest_solving: int = 1
    most_solving: int = 4


# Rules of training documents and problems, by the count of numbers. With five, one first move has
# about 1,700 tokens below it, so instances are kept if their search mostly ends within 8,192. With
# three, a document has about 70 tokens, so that a model sees many ends of searches.
TRAINING = {
    3: CountdownRule(numbers=3),
    4: CountdownRule(),
    5: CountdownRule(numbers=5, fewest_solving=6, most_solving=12),
}
PROBLEMS = {
    3: CountdownRule(numbers=3, most_solving=2),
    4: CountdownRule(most_solving=2),
    5: CountdownRule(numbers=5, fewest_solving=6, most_solving=9),
}


class Hit(NamedTuple):
    """First line of a search that meets a target.

    Attributes:
        end: Number of tokens of the block up to and including the target.
        moves: Moves from the state of the block to the target.
    """

    end: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Whole search below a state.

    Attributes:
        tokens: uint16 [tokens].
        marks: Indices of the number of the first move, int64 [lines].
        hits: First hit of each target.
    """

    tokens: Tokens
    marks: npt.NDArray[np.int64]
    hits: dict[int, Hit] = field(default_factory=dict)

    def numbered(self, number: int, end: int | None = None) -> Tokens:
        """Return a copy of the first `end` tokens below the first move of this number."""
        tokens = self.tokens.copy()
        tokens[self.marks] = MARK + number
        return tokens[:end]


def results(left: int, right: int) -> list[int | None]:
    """Return sum, difference, product and quotient of `left >= right`; None where undefined."""
    values = (
        left + right,
        left - right,
        left * right if right > 1 else 0,
        left // right if right > 1 and left % right == 0 else 0,
    )
    return [value if 1 <= value <= LARGEST else None for value in values]


def moves(state: State) -> Iterator[tuple[Move, State]]:
    """Yield every different move from a state, with the remaining numbers."""
    seen = set[tuple[int, int]]()
    for high in range(len(state)):
        for low in range(high):
            left, right = state[high], state[low]
            if (left, right) in seen:
                continue
            seen.add((left, right))
            rest = state[:low] + state[low + 1 : high] + state[high + 1 :]
            for operator, result in zip(OPERATORS, results(left, right), strict=True):
                if result is not None:
                    yield Move(left, operator, right, result), tuple(sorted((*rest, result)))


@lru_cache(_STATES)
def reachable(state: State) -> int:
    """Return a bit mask whose bit n is set if all numbers of the state can give n."""
    if len(state) == 2:
        values = (value for value in results(state[1], state[0]) if value is not None)
        return sum(1 << value for value in set(values))
    bits = 0
    for _, rest in moves(state):
        bits |= reachable(rest)
    return bits


@lru_cache(_BLOCKS)
def _last_moves(state: State) -> Block:
    """Return the search below a state of three numbers."""
    return _searched(state)


def _block(state: State) -> Block:
    if len(state) == 2:
        return _last_results(state)
    return _last_moves(state) if len(state) == 3 else _searched(state)


def _searched(state: State) -> Block:
    parts: list[Tokens] = []
    marks: list[npt.NDArray[np.int64]] = []
    hits: dict[int, Hit] = {}
    end = 0
    for move, rest in moves(state):
        line = [MARK, *_stated(move), *_left(rest)]
        parts.append(np.array(line, dtype=np.uint16))
        marks.append(np.array([end]))
        end += len(line)
        below = _block(rest)
        for target, hit in below.hits.items():
            hits.setdefault(target, Hit(end + hit.end, (move, *hit.moves)))
        parts.append(below.tokens)
        marks.append(below.marks + end)
        end += len(below.tokens)
    if not parts:
        return Block(np.empty(0, dtype=np.uint16), np.empty(0, dtype=np.int64))
    return Block(np.concatenate(parts), np.concatenate(marks), hits)


def _last_results(pair: State) -> Block:
    """Return the results of the last two numbers, such as `> 15 7 44 .` after `11 4`."""
    right, left = pair
    tokens, hits = [ID[">"]], dict[int, Hit]()
    for operator, result in zip(OPERATORS, results(left, right), strict=True):
        tokens.append(ID["."] if result is None else NUMBER + result)
        if result is not None:
            hits.setdefault(result, Hit(len(tokens), (Move(left, operator, right, result),)))
    return Block(np.array(tokens, dtype=np.uint16), np.empty(0, dtype=np.int64), hits)


def _left(state: State) -> list[int]:
    """Return the remaining numbers; the larger one of two comes first, as in a move."""
    return [NUMBER + number for number in (state if len(state) > 2 else state[::-1])]


def _stated(move: Move) -> list[int]:
    """Return the move of a line, such as `4 * 3 = 12 :`."""
    left, operator, right, result = move
    return [
        *(NUMBER + left, ID[operator], NUMBER + right),
        *(ID["="], NUMBER + result, ID[":"]),
    ]


@lru_cache(_BLOCKS)
def _first_moves(state: State) -> tuple[tuple[Move, State, int], ...]:
    """Return moves, the states they lead to, and the targets reachable from there."""
    return tuple((move, rest, reachable(rest)) for move, rest in moves(state))


def solving_moves(instance: Instance) -> int:
    """Count the first moves from which the target can be reached."""
    first_moves = _first_moves(tuple(sorted(instance.numbers)))
    return sum(bits >> instance.target & 1 for _, _, bits in first_moves)


def instance(rng: random.Random, rule: CountdownRule, split: Split) -> Instance:
    """Draw an instance of a split: uniform numbers and targets that the rule keeps.

    Raises:
        DataError: The rule keeps none of many drawn instances.
    """
    for _ in range(_TRIES):
        drawn = _drawn(rng, rule)
        if _keeps(rule, drawn, split):
            return drawn
    raise DataError(f"{_stated_rule(rule)}: none of {_TRIES:,} drawn instances fits; allow more")


def _drawn(rng: random.Random, rule: CountdownRule) -> Instance:
    numbers = tuple(rng.randint(1, LARGEST_NUMBER) for _ in range(rule.numbers))
    return Instance(numbers, rng.choice(TARGETS))


def _keeps(rule: CountdownRule, drawn: Instance, split: Split) -> bool:
    return (
        drawn.held_out == (split == "held_out")
        and rule.fewest_solving <= solving_moves(drawn) <= rule.most_solving
        and len(_first_moves(tuple(sorted(drawn.numbers)))) <= MOST_FIRST_MOVES
    )


def _stated_rule(rule: CountdownRule) -> str:
    given = f"--fewest-solving {rule.fewest_solving} --most-solving {rule.most_solving}"
    return f"--numbers {rule.numbers} {given}"


@dataclass(frozen=True, slots=True)
class Countdown:
    """Training documents of the instances that rules keep, each rule equally often."""

    rules: tuple[CountdownRule, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Values that determine the documents, besides the seed."""
        if len(self.rules) == 1:
            return {"task": "countdown", **asdict(self.rules[0])}
        return {"task": "countdown", "rules": [asdict(rule) for rule in self.rules]}

    def draw(self, rng: random.Random) -> Drawn:
        """Draw a document of an instance that is not held out."""
        rule = self.rules[0] if len(self.rules) == 1 else rng.choice(self.rules)
        drawn = instance(rng, rule, "train")
        return Drawn(search(rng, drawn), prompt=len(drawn.prompt.split()))


def held_out_problems(count: int, rule: CountdownRule, seed: int) -> list[dict[str, Any]]:
    """Draw different held-out instances, each with an answer.

    Args:
        count: Number of instances.
        rule: Rule of the drawn instances.
        seed: The same seed gives the same problems.

    Raises:
        DataError: Not enough instances are found.
    """
    rng, seen = random.Random(seed), dict[tuple[State, int], dict[str, Any]]()
    rejected = 0
    while len(seen) < count:
        if rejected == _TRIES:
            raise DataError(
                f"{_stated_rule(rule)} --problems {count}: {_TRIES:,} draws after the first "
                f"{len(seen):,} problems gave no other; ask for fewer, or allow more"
            )
        rejected += 1
        drawn = _drawn(rng, rule)
        if _keeps(rule, drawn, "held_out"):
            row, key = _problem(rng, drawn), (tuple(sorted(drawn.numbers)), drawn.target)
            if key not in seen:
                seen[key], rejected = row, 0
    return list(seen.values())


def _problem(rng: random.Random, drawn: Instance) -> dict[str, Any]:
    words = decoded(search(rng, drawn))
    return {
        "numbers": list(drawn.numbers),
        "target": drawn.target,
        "answer": " ".join(words[words.index("ANS") + 1 : -1]),
        "solving_moves": solving_moves(drawn),
    }


def search(rng: random.Random, instance: Instance) -> Tokens:
    """Return prompt, search, answer and `<eod>`, first moves in random order; uint16 [tokens].

    Raises:
        ValueError: The target cannot be reached.
    """
    first = list(_first_moves(tuple(sorted(instance.numbers))))
    rng.shuffle(first)
    parts = [np.array([ID[word] for word in instance.prompt.split()], dtype=np.uint16)]
    for number, (move, rest, bits) in enumerate(first, 1):
        line = [ID["R"], MARK + number, *_stated(move), *_left(rest)]
        parts.append(np.array(line, dtype=np.uint16))
        block = _block(rest)
        if bits >> instance.target & 1:
            hit = block.hits[instance.target]
            answer = [ID["!"], *_answer((move, *hit.moves)), ID[EOD]]
            parts += [block.numbered(number, hit.end), np.array(answer, dtype=np.uint16)]
            return np.concatenate(parts)
        parts.append(block.numbered(number))
    raise ValueError(f"{instance.prompt}: the target cannot be reached")


def _answer(path: tuple[Move, ...]) -> list[int]:
    words = [word for move in path for word in (",", *move.words)]
    return [ID[word] for word in ("ANS", *words[1:])]
