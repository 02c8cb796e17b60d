"""Statements about where the text of a shard comes from, which the model card repeats."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Source and licence of a text, as its user states them.

    Attributes:
        source: Name or address of the source, or `unknown`.
        license: Licence of the text, such as `CC-BY-4.0`, or `unknown`.
        model: Name of the model that wrote the text; None for text that no command generated.
    """

    source: str = UNKNOWN
    license: str = UNKNOWN
    model: str | None = None


UNKNOWN_TERMS = Terms()


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Terms):
    """Part of a shard with one source.

    Attributes:
        sha256: Hash of the token file that was first made of the source.
        tokens: Tokens of this source in the shard.
    """

    sha256: str
    tokens: int


def counted(terms: Terms, sha256: str, tokens: int) -> Origin:
    """Return the origin of a whole shard."""
    return Origin(**asdict(terms), sha256=sha256, tokens=tokens)


def taken(origins: tuple[Origin, ...], tokens: int) -> tuple[Origin, ...]:
    """Return the origins of `tokens` tokens that were taken from a shard at random.

    The count of each origin is exact for a shard of one origin, and expected for a blend.
    """
    total = sum(origin.tokens for origin in origins)
    return tuple(replace(one, tokens=round(tokens * one.tokens / total)) for one in origins)
