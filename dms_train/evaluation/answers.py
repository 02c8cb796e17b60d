r"""Whether a text ends in the right answer to a problem.

An answer in a box is extracted as open-r1 does it (the last `\boxed{}` first, then an anchored
phrase such as "the final answer is $5$"; never the last number of the text) and compared by
math-verify. Three cases that math-verify accepts are wrong here: another base (`17_8` for 17),
another unit (18 m for 18 cm) and a set for a tuple.

The time of a call of math-verify is limited, in seconds of the processor, so that a busy machine
finds what a free one does. The limit is a signal, which only the main thread of a process can have,
and which does not interrupt arithmetic of very large numbers: `verification` runs `verify_answer`
in processes of its own.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

END_OF_REASONING = "</think>"
_START_OF_REASONING = "<think>"
CALL_SECONDS = 5.0  # of the processor, for each call of math-verify
_CALL_CLOCK_SECONDS = 120  # math-verify's own limit


class Verdict(StrEnum):
    """What `verify_answer` finds.

    Attributes:
        CORRECT: The answer equals the gold answer.
        WRONG: It does not, or two different answers are given.
        NO_ANSWER: No complete answer stands where it is asked for.
        UNFINISHED: The text ends within its reasoning.
        UNREADABLE_GOLD: The gold answer is no expression, so nothing can be compared.
        TIMEOUT: Reading or comparing took too long.
        CRASHED: The process that compared was killed by something else (see `verification`).
    """

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    UNFINISHED = "unfinished"
    UNREADABLE_GOLD = "unreadable_gold"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


class AnswerForm(StrEnum):
    r"""Where the answer stands.

    Attributes:
        BOXED: `\boxed{ANSWER}`, an expression in LaTeX.
        STATED: "The final answer is ANSWER", a number.
    """

    BOXED = "boxed"
    STATED = "stated"


class Attempt(NamedTuple):
    """A text and the answer that it should end in.

    Attributes:
        gold: The right answer: LaTeX without `$`, or a number.
        text: What a model wrote, with or without its reasoning.
        form: Where the answer stands.
        allow_unfinished: Look for an answer also in reasoning that is not closed.
    """

    gold: str
    text: str
    form: AnswerForm = AnswerForm.BOXED
    allow_unfinished: bool = False


def verify_answer(attempt: Attempt) -> Verdict:
    """Compare the answer that a text ends in with the gold answer.

    Reasoning up to the last `</think>` is ignored.

    Raises:
        ModuleNotFoundError: math-verify is not installed and the form is `BOXED`.
        ValueError: Not called in the main thread of a process.
    """
    answer = attempt.text.rpartition(END_OF_REASONING)[2]
    if not attempt.allow_unfinished and final_text(attempt.text) is None:
        return Verdict.UNFINISHED
    if attempt.form is AnswerForm.STATED:
        return _verify_stated(attempt.gold, answer)
    return _verify_boxed(attempt.gold.strip(), answer)


def final_text(text: str) -> str | None:
    """What follows the last `</think>`; None in a text that ends within its reasoning."""
    answer = text.rpartition(END_OF_REASONING)[2]
    return None if _START_OF_REASONING in answer else answer


def boxed_answer(text: str) -> str | None:
    """Content of the last box behind the reasoning; None without a complete one."""
    return _last_box(text.rpartition(END_OF_REASONING)[2]) or None


def stated_answer(text: str) -> str | None:
    """The number behind the last "The final answer is", without zeros that mean nothing."""
    match = _stated(text.rpartition(END_OF_REASONING)[2])
    number = _number(match[1]) if match is not None else None
    return None if number is None else f"{number.normalize():f}"


# A number that ends its line, words such as a unit aside.
_STATED = re.compile(
    r"The final answer is:? *\$?(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+)"
    r"(?![\d.,]*\d)(?! *[-+*/^=\\])[^\d\n]*$",
    re.MULTILINE,
)


def _verify_stated(gold: str, text: str) -> Verdict:
    expected = _number(gold)
    if expected is None:
        return Verdict.UNREADABLE_GOLD
    match = _stated(text)
    if match is None:
        return Verdict.NO_ANSWER
    return Verdict.CORRECT if _number(match[1]) == expected else Verdict.WRONG


def _stated(text: str) -> re.Match[str] | None:
    last = text.rfind("The final answer is")
    return _STATED.match(text, last) if last >= 0 else None


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", "").strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _verify_boxed(gold: str, text: str) -> Verdict:
    box = _last_box(text)
    if box is not None and not box:
        return Verdict.NO_ANSWER
    word = _word(gold)
    if word is not None:
        if box is None:
            return Verdict.NO_ANSWER
        return Verdict.CORRECT if _bare(box) == word else Verdict.WRONG
    verdict = _compare(_braced(gold), _braced(text))
    if verdict is Verdict.CORRECT and box is not None and not _same_kind(gold, box):
        return Verdict.WRONG
    return verdict


def _last_box(text: str) -> str | None:
    """Content of the last box; None without a box, empty for one that is empty or malformed."""
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    opening = re.compile(r"\\boxed\s*\{").match(text, start)
    if opening is None:
        return ""
    depth = 1
    for position in range(opening.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            goes_on = re.compile(r"\s*\{|[\d^_!]").match(text, position + 1)
            return "" if goes_on else text[opening.end() : position].strip()
    return ""


_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")


def _bare(answer: str) -> str:
    r"""An answer without `\text`, dollars, spaces at its ends and capitals."""
    return _TEXT.sub(r"\1", answer).strip(" $.").casefold()


def _word(gold: str) -> str | None:
    """The gold answer where it is a word; as LaTeX it would be a product of its letters."""
    bare = _bare(gold)
    fewest = 2 if _TEXT.fullmatch(gold.strip(" $")) else 4
    return bare if re.fullmatch(rf"[a-z]{{{fewest},}}(?:[ -][a-z]+)*", bare) else None


# Arguments that TeX takes without braces, such as \frac43; math-verify reads braced ones only.
_UNBRACED = (
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(?=[\d{])"), r"\\frac{\1}"),
    (re.compile(r"\\[dt]?frac\s*(\{[^{}]*\})\s*(\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
)


def _braced(text: str) -> str:
    for pattern, replacement in _UNBRACED:
        text = pattern.sub(replacement, text)
    return text


@cache
def _math_verify() -> Any:
    """The library; imported late because it takes half a second."""
    import math_verify

    return math_verify


@cache
def _boxed_first() -> list[Any]:
    """open-r1's extraction: boxes first, no expression without a box or an anchoring phrase."""
    from latex2sympy2_extended import NormalizationConfig

    rule = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all"
    )
    return [
        _math_verify().LatexExtractionConfig(
            boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=rule
        )
    ]


@contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Raise math-verify's TimeoutException after that time of this process on a processor.

    It is raised again after each further such time, because math-verify catches some of them.

    Raises:
        ValueError: Not called in the main thread of a process.
    """
    from math_verify.errors import TimeoutException

    def stop(number: int, frame: Any) -> None:
        raise TimeoutException(f"{seconds:g} s of processor time are used up")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _compare(gold: str, text: str) -> Verdict:
    from math_verify.errors import TimeoutException

    try:
        return _compare_in_time(gold, text)
    except TimeoutException:  # a BaseException, of one call
        return Verdict.TIMEOUT


def _compare_in_time(gold: str, text: str) -> Verdict:
    expected = _parsed(f"${gold}$")
    if not expected:
        return Verdict.UNREADABLE_GOLD
    found = _parsed(text, extraction_config=_boxed_first())
    if not found:
        return Verdict.NO_ANSWER
    try:
        equal = _verified(expected, found, raise_on_error=True)
    except Exception:  # of one of the pairs; the others may still be equal
        equal = _verified(expected, found)
    return Verdict.CORRECT if equal else Verdict.WRONG


def _verified(expected: list[Any], found: list[Any], **options: Any) -> bool:
    with processor_limit(CALL_SECONDS):
        limit = _CALL_CLOCK_SECONDS
        return bool(_math_verify().verify(expected, found, timeout_seconds=limit, **options))


def _parsed(text: str, **options: Any) -> list[Any]:
    options |= {"extraction_mode": "first_match", "parsing_timeout": _CALL_CLOCK_SECONDS}
    try:
        with processor_limit(CALL_SECONDS):
            return list(_math_verify().parse(text, raise_on_error=True, **options))
    except ValueError as error:
        if "thread" in str(error):
            raise
        return []
    except Exception:  # malformed LaTeX surfaces as many kinds of error
        return []


def _same_kind(gold: str, answer: str) -> bool:
    """Whether base, unit and brackets agree, which math-verify drops."""
    gold, answer = gold.strip(" $."), answer.strip(" $.")
    if _base(gold) != _base(answer):
        return False
    units = _unit(gold), _unit(answer)
    # a unit may be left out, and may be written in full or not: cm, centimeters
    if all(units) and units[0][:1] != units[1][:1]:
        return False
    return {_bracket(gold), _bracket(answer)} != {"(", "{"}


def _base(answer: str) -> str | None:
    match = re.fullmatch(r"[0-9A-F.]+_\{?(\d+)\}?", answer.replace(" ", ""))
    return match[1] if match else None


def _unit(answer: str) -> str:
    """Text after a number, such as `cm`; empty when there is none."""
    match = re.search(r"[\d}]\s*\\[ ,]?\s*(?:text|mathrm|mbox)\s*\{\s*([^{}]*)\}", answer)
    if match is None or _TEXT.fullmatch(answer):
        return ""
    return re.sub(r"square|sq\b|cubic|\W", "", match[1].casefold())


def _bracket(answer: str) -> str:
    opening = re.match(r"(?:\\left|\\big)?\s*\\?([({\[])", answer)
    return opening[1] if opening else ""
