r"""Judge whether a text ends in the right answer to a problem.

An answer in a box is extracted like in open-r1, and math-verify compares it. The last `\boxed{}`
comes first, then an anchored phrase such as "the final answer is $5$". The last number of the text
never counts. Three answers that math-verify accepts are wrong here: another base (`17_8` for 17),
another unit (18 m for 18 cm), and a set for a tuple.

The processor time of each math-verify call is limited, so that a busy machine gives the same
verdicts as a free one. The limit is a signal. It works in the main thread only, and does not
interrupt arithmetic of very large numbers. `verification` therefore runs `verify_answer` in its own
processes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

from dms_train.evaluation.answer_text import (
    TEXT,
    Measured,
    last_box,
    plain_latex,
    same_unit,
    split_unit,
)

END_OF_REASONING = "</think>"
_START_OF_REASONING = "<think>"
CALL_SECONDS = 5.0  # seconds of processor time for each call of math-verify
_CALL_CLOCK_SECONDS = 120  # math-verify's own limit
_DIGITS = 50  # digits of irrational numbers; math-verify's 15 make numbers below 1e-15 equal
_LEAST_ROUNDED = 0.1  # from here on, six places after the point are six significant digits


class Verdict(StrEnum):
    """Result of `verify_answer`.

    Attributes:
        CORRECT: The answer equals the gold answer.
        WRONG: The answer differs from the gold answer, or two different answers are given.
        NO_ANSWER: The text has no complete answer in the required form.
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
    r"""Form in which a text states its answer.

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
        text: Text that a model wrote, with or without its reasoning.
        form: Form in which the text states its answer.
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
    from math_verify.errors import TimeoutException

    try:
        return _verify_boxed(attempt.gold.strip(), answer)
    except TimeoutException:  # a BaseException; it ends one math-verify call only
        return Verdict.TIMEOUT


def final_text(text: str) -> str | None:
    """Return the text after the last `</think>`; None where the reasoning is not closed."""
    answer = text.rpartition(END_OF_REASONING)[2]
    return None if _START_OF_REASONING in answer else answer


def boxed_answer(text: str) -> str | None:
    """Return the content of the last box after the reasoning; None without a complete one."""
    return last_box(text.rpartition(END_OF_REASONING)[2]) or None


def stated_answer(text: str) -> str | None:
    """Return the number after the last "The final answer is", without zeros that mean nothing."""
    number = _stated(text.rpartition(END_OF_REASONING)[2])
    return None if number is None else f"{number.normalize():f}"


def same_number_or_text(one: str, other: str) -> bool:
    """Return whether two answers are the same text or the same number, such as 1,200 and 1200.

    A currency or percent sign may be left out. Codes such as 007 are compared as text.
    """
    first, second = (_number(plain_latex(answer)) for answer in (one, other))
    is_code = any(re.match(r"\s*[-+]?0\d", answer) for answer in (one, other))
    if is_code or first is None or second is None:
        return one.strip() == other.strip()
    return first == second


_PHRASE = "the final answer is"
_NUMBER = r"[-+]? *(?:\\?[$€£])? *[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?\.\d+"
# A number that ends its line, words such as a unit aside.
_STATED = re.compile(
    rf"{_PHRASE}[:*]* *(?:[$*]|\\\(|\\boxed *\{{)*({_NUMBER})"
    r"(?![\d.,]*\d)(?! *(?:[-+/^=]|\*(?!\*|$)|\\(?![)%, ]|text|mathrm)))[^\d\n]*$",
    re.MULTILINE | re.IGNORECASE,
)


def _verify_stated(gold: str, text: str) -> Verdict:
    expected = _number(gold)
    if expected is None:
        return Verdict.UNREADABLE_GOLD
    stated = _stated(text)
    if stated is None:
        return Verdict.NO_ANSWER
    return Verdict.CORRECT if stated == expected else Verdict.WRONG


def _stated(text: str) -> Decimal | None:
    phrases = list(re.finditer(_PHRASE, text, re.IGNORECASE))
    if not phrases:
        return None
    line = plain_latex(text[phrases[-1].start() :].partition("\n")[0])
    match = _STATED.match(line)
    return _number(match[1]) if match is not None else None


_PLAIN_NUMBER = re.compile(r"([-+]?)(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|([-+]?)\.\d+")


def _number(text: str) -> Decimal | None:
    """Return a number in plain LaTeX, a currency or percent sign aside; None for other text."""
    bare = re.sub(r"\\?[$€£%]", "", text).strip()
    bare = re.sub(r"^([-+])\s+", r"\1", bare)
    return Decimal(bare.replace(",", "")) if _PLAIN_NUMBER.fullmatch(bare) else None


def _verify_boxed(gold: str, text: str) -> Verdict:
    box = last_box(text)
    if box is not None and not box:
        return Verdict.NO_ANSWER
    word = _word(gold)
    if word is not None:
        if box is None:
            return Verdict.NO_ANSWER
        return Verdict.CORRECT if _bare(box) == word else Verdict.WRONG
    expression = _anchored(text) if box is None else box
    if not expression:
        return Verdict.NO_ANSWER
    return _verify_expression(plain_latex(gold), plain_latex(expression))


def _anchored(text: str) -> str:
    """Return the expression after a phrase such as "the final answer is"; empty without one."""
    parsed = _parsed(text, extraction_config=_extraction(gold=False))
    return next((one for one in parsed if isinstance(one, str)), "")


def _verify_expression(gold: str, answer: str) -> Verdict:
    if gold and gold.split() == answer.split():
        return Verdict.CORRECT
    expected, given = split_unit(gold), split_unit(answer)
    if expected.unit and not given.unit:
        given = split_unit(answer, attached=True)
    elif given.unit and not expected.unit:
        expected = split_unit(gold, attached=True)
    verdict = _compare(expected.value, rf"\boxed{{{given.value}}}")
    if verdict is Verdict.WRONG and [expected.unit, given.unit].count("%") == 1:
        fractions = [rf"\frac{{{v}}}{{100}}" if unit == "%" else v for v, unit in (expected, given)]
        verdict = _compare(fractions[0], rf"\boxed{{{fractions[1]}}}")
    if verdict is Verdict.CORRECT and not _same_kind(expected, given):
        return Verdict.WRONG
    return verdict


_TEXT = re.compile(rf"{TEXT}\{{([^{{}}]*)\}}")


def _bare(answer: str) -> str:
    r"""Return an answer without `\text`, dollars, spaces at its ends and capitals."""
    return _TEXT.sub(r"\1", answer).strip(" $.").casefold()


def _word(gold: str) -> str | None:
    """Return the gold answer where it is a word; as LaTeX it would be a product of its letters."""
    bare = _bare(gold)
    fewest = 2 if _TEXT.fullmatch(gold.strip(" $")) else 4
    is_word = re.fullmatch(rf"[a-z]{{{fewest},}}(?:[ -][a-z]+)*", bare)
    return bare if is_word and bare != "infinity" else None


@cache
def _math_verify() -> Any:
    """Import math-verify late, because it takes half a second."""
    import math_verify

    return math_verify


@cache
def _extraction(*, gold: bool) -> list[Any]:
    """Return math-verify's rules for reading, without units, which this module compares.

    Texts follow open-r1: boxes first, no expression without a box or an anchoring phrase.
    """
    from latex2sympy2_extended import NormalizationConfig

    library = _math_verify()
    rule = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=gold, nits=gold, boxed="all"
    )
    if gold:
        latex = library.LatexExtractionConfig(normalization_config=rule)
        return [latex, library.ExprExtractionConfig()]
    return [
        library.LatexExtractionConfig(
            boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=rule
        )
    ]


@contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Raise math-verify's TimeoutException after `seconds` of processor time of this process.

    It is raised again after each further `seconds`, because math-verify catches some of them.

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
    expected = _parsed(f"${gold}$", extraction_config=_extraction(gold=True))
    if not expected:
        return Verdict.UNREADABLE_GOLD
    given = _parsed(text, extraction_config=_extraction(gold=False))
    if not given:
        return Verdict.NO_ANSWER
    with processor_limit(CALL_SECONDS):
        exact = [_exact(one) for one in expected], [_exact(one) for one in given]
    equal = _verified(*exact) or (_may_round(expected, given) and _verified(expected, given))
    return Verdict.CORRECT if equal else Verdict.WRONG


def _exact(expression: Any) -> Any:
    """Replace decimals by fractions and compute rational parts, for an exact comparison."""
    if isinstance(expression, str):
        return expression
    from sympy import Float, Rational

    try:
        exact = expression.xreplace({x: Rational(str(x)) for x in expression.atoms(Float)})
        value = exact.doit() if exact.is_number else exact
    except Exception:  # each function raises its own kinds
        return expression
    return value if value.is_Rational else exact


def _may_round(expected: list[Any], given: list[Any]) -> bool:
    """Return whether one side has decimals, none near zero, and may be the other one rounded.

    math-verify rounds at six places after the point; close to zero that says nothing.
    """
    from sympy import Float

    sides = [
        set().union(*(one.atoms(Float) for one in side if not isinstance(one, str)))
        for side in (expected, given)
    ]
    if bool(sides[0]) == bool(sides[1]):
        return False
    return all(abs(one) >= _LEAST_ROUNDED for side in sides for one in side)


def _verified(expected: list[Any], given: list[Any]) -> bool:
    """Compare with math-verify; an error in one pair leaves the others, which may be equal."""
    try:
        return _verify(expected, given, raise_on_error=True)
    except Exception:
        return _verify(expected, given)


def _verify(expected: list[Any], given: list[Any], **options: Any) -> bool:
    with processor_limit(CALL_SECONDS):
        options |= {"timeout_seconds": _CALL_CLOCK_SECONDS, "numeric_precision": _DIGITS}
        return bool(_math_verify().verify(expected, given, **options))


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


def _same_kind(gold: Measured, answer: Measured) -> bool:
    """Return whether base, unit and brackets agree, which math-verify drops."""
    if _base(gold.value) != _base(answer.value):
        return False
    if not same_unit(gold.unit, answer.unit):
        return False
    return {_bracket(gold.value), _bracket(answer.value)} != {"(", "{"}


def _base(answer: str) -> str | None:
    match = re.fullmatch(r"[0-9A-F.]+_\{?(\d+)\}?", answer.replace(" ", ""))
    return match[1] if match else None


def _bracket(answer: str) -> str:
    opening = re.match(r"(?:\\left|\\big)?\s*\\?([({\[])", answer)
    return opening[1] if opening else ""
