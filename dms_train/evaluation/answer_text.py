r"""Answer in a text: its last box, its notation and its unit.

math-verify reads one notation only. `plain_latex` rewrites the others that models use, such as
`3 1/2`, `0.\overline{3}`, `1\,000` or full-width digits. `split_unit` separates the unit, because
math-verify drops units without comparing them.
"""

# ruff: noqa: RUF001 - the signs below occur in texts
from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*"

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED_BOX = re.compile(r"(?!\{)\S.*?(?=\$|\\\)|\\\]|[.,;]?\s|[.,;]?$)", re.MULTILINE)
# An exclamation mark at the end of a sentence is no factorial; degrees are a unit.
_DEGREE = r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)"
_CONTINUATION = re.compile(rf"\{{|[\d_]|(?!{_DEGREE})\^|!(?!\s|\*|$)")
# Two boxes with nothing else between them give one answer, such as two solutions.
_BETWEEN_BOXES = re.compile(
    rf"(?:{_DEGREE})?[\s$.]*(?:[,;]|(?:,\s*)?(?:and|or))[\s$]*(?:[A-Za-z]\s*=\s*)?",
    re.IGNORECASE,
)


class Box(NamedTuple):
    """A box in a text.

    Attributes:
        start: Index of the command of the box.
        content: Content of the box; empty if it is empty, not closed or continued afterwards.
        end: Index after the box.
    """

    start: int
    content: str
    end: int


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed` or `\fbox`; None without one.

    Boxes that only a comma, "and" or "or" separates from the last one belong to its content. The
    result is empty where one of them is empty, not closed, or continued as in `\boxed{5}0`.
    """
    commands = list(_BOX.finditer(text))
    if not commands:
        return None
    last = _box(text, commands.pop())
    contents, start = [last.content], last.start
    while commands:
        box = _box(text, commands.pop())
        if box.end > start or not _BETWEEN_BOXES.fullmatch(text, box.end, start):
            break
        contents.insert(0, box.content)
        start = box.start
    return ", ".join(dict.fromkeys(contents)) if all(contents) else ""


def _box(text: str, command: re.Match[str]) -> Box:
    start, opening = command.start(), command.end()
    if not text.startswith("{", opening):
        content = _UNBRACED_BOX.match(text, opening)
        return Box(start, content[0], content.end()) if content else Box(start, "", opening)
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            end = match.end()
            continued = _CONTINUATION.match(text, end)
            return Box(start, "" if continued else text[opening + 1 : end - 1].strip(), end)
    return Box(start, "", len(text))


_SYMBOLS = {
    **dict.fromkeys("−‐‑‒–﹣", "-"),
    **dict.fromkeys("\xa0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008", " "),
    **dict.fromkeys("\u2009\u200a\u202f\u205f\u3000", " "),
    **dict.fromkeys("\u200b\u2060\ufeff", ""),
    **{"×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "±": r"\pm "},
    **{"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ", "∅": r"\emptyset ", "∈": r"\in "},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap "},
}
_FULL_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_TABLE = str.maketrans(_SYMBOLS) | _FULL_WIDTH | {ord("。"): "."}
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_SPACE = r"(?:\\[ ,;:!]|\\q?quad(?![a-z])|[\s~])"
_THOUSANDS = re.compile(
    rf"(?<![\d.,])(\d{{1,3}})((?:(?:{_SPACE}|\{{,\}}|,\\!)+\d{{3}})+)(?!{_SPACE}*[\d/])"
)
_REPEATING = re.compile(
    r"(?<![\d.])(\d{1,99})\.(\d{0,99})\\(?:overline|bar)\s*(?:\{(\d{1,99})\}|(\d))(?!\d)"
)
_MIXED = re.compile(rf"(?<![\d.^_])(\d+){_SPACE}+([1-9]\d{{0,99}})\s*/\s*(\d{{1,99}})(?![\d.])")
_STYLE = re.compile(r"\\displaystyle(?![a-z])\s*")
_REWRITTEN = (
    # arguments that TeX takes without braces; math-verify reads braced ones only
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(?=[\d{])"), r"\\frac{\1}"),
    (re.compile(r"\\[dtc]?frac\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*(\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"\\varnothing(?![a-z])"), r"\\emptyset"),
    (re.compile(rf"{TEXT}\{{\s*infinity\s*\}}|(?<!\\)\binfinity\b", re.IGNORECASE), r"\\infty"),
    (re.compile(rf"{TEXT}\{{\s*(-?\d[\d.,]*|e)\s*\}}"), r"\1"),
    (re.compile(r"(?<![\d}.])\.(?=\d)"), "0."),
)


def full_width_to_ascii(text: str) -> str:
    """Replace full-width letters, digits and signs by ASCII."""
    return text.translate(_FULL_WIDTH)


def plain_latex(answer: str) -> str:
    """Rewrite an answer in the notation that math-verify reads."""
    answer = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(_POWERS)}}}", answer)
    answer = re.sub(r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒]", _vulgar, answer.translate(_TABLE))
    answer = re.sub(r"[^\W\D]", lambda m: str(unicodedata.decimal(m[0])), answer)
    answer = _trimmed(_STYLE.sub("", answer))
    for pattern, replacement in _REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = _THOUSANDS.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), answer)
    answer = _MIXED.sub(_mixed, answer)
    return _REPEATING.sub(_repeating, answer)


def _vulgar(match: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", match[0]).split("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


def _mixed(match: re.Match[str]) -> str:
    """Return `3 1/2` as an integer before a fraction, which math-verify adds up."""
    whole, above, below = match.groups()
    return rf"{whole}\frac{{{above}}}{{{below}}}" if int(above) < int(below) else match[0]


def _repeating(match: re.Match[str]) -> str:
    r"""Return `0.1\overline{6}` as a fraction."""
    whole, fixed, period = match[1], match[2], match[3] or match[4]
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), scale) + Fraction(int(period), scale) / (
        10 ** len(period) - 1
    )
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _trimmed(answer: str) -> str:
    """Remove dollars of TeX, spaces and a final full stop or comma from the ends."""
    answer = re.sub(rf"^(?:{_SPACE}|(?<!\\)\$|\\[(\[])+", "", answer)
    return re.sub(rf"(?:{_SPACE}|(?<!\\)\$|(?<!\\)[.,;]|\\[)\]]|\\)+$", "", answer)


# Units by their names; any other text after a number is no unit of measurement.
_UNITS = {
    "mm": "millimeter millimeters millimetre millimetres",
    "cm": "centimeter centimeters centimetre centimetres",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "mg": "milligram milligrams",
    "g": "gram grams gm",
    "kg": "kilogram kilograms",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "t": "ton tons tonne tonnes",
    "ml": "milliliter milliliters millilitre millilitres",
    "l": "liter liters litre litres",
    "gal": "gallon gallons",
    "qt": "quart quarts",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "d": "day days",
    "wk": "week weeks",
    "mo": "month months",
    "yr": "year years",
    "am": "a.m",
    "pm": "p.m",
    "deg": "degree degrees",
    "rad": "radian radians",
    "$": "dollar dollars usd",
    "cent": "cents ¢",
    "eur": "euro euros €",
    "gbp": "£",
    "mph": "mi/h",
    "j": "joule joules",
    "n": "newton newtons",
    "w": "watt watts",
    "v": "volt volts",
    "%": "percent pct",
}
_NAMES = {name: unit for unit, names in _UNITS.items() for name in (unit, *names.split())}
_PREFIXED = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
# words that are part of an expression
_MATHEMATICS = frozenset(("infty", "sqrt", "arcsin", "arccos", "arctan"))


class Measured(NamedTuple):
    """An answer and its unit.

    Attributes:
        value: The answer without its unit.
        unit: Unit of the answer, by one name for each unit, such as `mi/h` or `cm^2`; empty without
            one, or for words that are no unit of measurement, such as `apples`.
    """

    value: str
    unit: str = ""


_WORDS = r"[A-Za-z$€£¢%][A-Za-z.]*"
_TEXT_UNIT = re.compile(
    rf"(?P<value>.*?)(?P<unit>{_SPACE}*(?:\^?\{{?{TEXT}\{{[^{{}}]*\}}\}}?"
    rf"(?:\^\{{?-?\d\}}?)?(?:{_SPACE}|[/.])*)+)",
    re.DOTALL,
)
_BARE_UNIT = re.compile(
    rf"(?P<value>.*(?:[\d}})!]|\\pi))(?P<space>{_SPACE}*)"
    rf"(?P<unit>{_WORDS}(?:(?: |/| per ){_WORDS})*(?:\^\{{?[23]\}}?)?)",
    re.DOTALL,
)
_CURRENCY = re.compile(
    rf"(?P<sign>-?){_SPACE}*(?P<unit>\\?\$|€|£){_SPACE}*(?P<value>.+)", re.DOTALL
)
_PERCENT = re.compile(rf"(?P<value>.*?){_SPACE}*\\?%", re.DOTALL)
_DEGREES = re.compile(rf"(?P<value>.*?){_SPACE}*{_DEGREE}", re.DOTALL)
_SUM_OR_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])|\+|[\dA-Za-z)}]\s*-")
# units of single letters; other products and quotients of letters are read as variables
_LETTERS = re.compile(r"[a-z$€£%](?:\^\{?\d\}?)?|[mgl](?:/| per )[shl](?:\^\{?\d\}?)?")


def split_unit(answer: str, *, attached: bool = False) -> Measured:
    """Separate the unit from an answer in plain LaTeX.

    Args:
        answer: A number or an expression, with or without a unit.
        attached: Read one letter directly after a number, such as in `5m`, as a unit; otherwise it
            is a variable.
    """
    for pattern, unit in ((_PERCENT, "%"), (_DEGREES, "deg")):
        if (match := pattern.fullmatch(answer)) and _is_value(match["value"]):
            return Measured(match["value"], unit)
    if (match := _CURRENCY.fullmatch(answer)) and _is_value(match["value"]):
        inner = split_unit(match["value"])
        return Measured(match["sign"] + inner.value, _unit_name(match["unit"].lstrip("\\")))
    if (match := _TEXT_UNIT.fullmatch(answer)) and _is_value(match["value"]):
        text = re.sub(rf"{TEXT}|[{{}}]|\^(?=\{{?\s*\\)", "", match["unit"])
        if text.strip() not in ("e", "i", "d"):
            return Measured(_without_degree(match["value"]), _unit_name(text))
    if (match := _BARE_UNIT.fullmatch(answer)) and _is_bare_unit(match, attached=attached):
        return Measured(match["value"], _unit_name(match["unit"]))
    return Measured(answer)


def _is_value(text: str) -> bool:
    return re.search(r"\d|\\pi|[A-Za-z]$", text) is not None and text[-1:] not in tuple(
        "+-=/,(<>_^"
    )


def _without_degree(value: str) -> str:
    match = _DEGREES.fullmatch(value)
    return match["value"] if match else value


def _is_bare_unit(match: re.Match[str], *, attached: bool) -> bool:
    unit, space = match["unit"], bool(match["space"])
    words = re.sub(r"/| per ", " ", unit.casefold()).split()
    words = [word.partition("^")[0].rstrip(".") for word in words]
    if not all(word in _NAMES or word in _PREFIXED for word in words):
        return space and all(len(word) >= 4 and word not in _MATHEMATICS for word in words)
    if any(len(word) > 1 for word in words):
        return True
    if not _LETTERS.fullmatch(unit.casefold()) or _SUM_OR_VARIABLE.search(match["value"]):
        return False
    return attached or (space and unit[0] in "mgshlL$€£%")


def _unit_name(text: str) -> str:
    """Return the one name of a unit, such as `mi/h`; empty for text that names none."""
    text = re.sub(r"\\[ ,;:!]|~|\\", " ", text.casefold()).strip(" .")
    text = re.sub(r"\s*(?:/|\bper\b)\s*", " / ", text)
    text = re.sub(r"\^\{?([23])\}?", r"^\1", text)
    factors: list[str] = []
    power = 1
    for word in text.split():
        word, _, exponent = word.rstrip(".").partition("^")
        if word in _PREFIXED:
            power = _PREFIXED[word]
        elif word == "/" and factors:
            factors.append("/")
        elif word in _NAMES:
            power = int(exponent or power)
            factors.append(_NAMES[word] + (f"^{power}" if power > 1 else ""))
            power = 1
    name = "".join(factors).strip("/")
    return _NAMES.get(name, name)


def same_unit(one: str, other: str) -> bool:
    """Return whether two units agree; a unit, a percent sign included, may be left out."""
    return not (one and other) or one == other
