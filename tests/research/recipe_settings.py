"""Settings and words of recipes in tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from research.recipe.steps import RECIPES, Settings

REAL = ("smollm2_135m", "qwen25_coder_0_5b")


def settings(root: Path, name: str = "smollm2_135m", **changes: object) -> Settings:
    given = Settings(
        recipe=RECIPES[name],
        root=root,
        model=None,
        prompts=None,
        column="prompt",
        text=(),
        device="cpu",
        rows=16,
        limit=10,
        benchmarks=None,
        held_out=None,
        haystack=None,
        cache_bytes=None,
        policies=(),
        ratios=(4, 8),
        dmc=False,
        control=False,
        allow_code=None,
    )
    return replace(given, **changes)


def words(folder: Path, *more: str) -> list[str]:
    return ["toy", "--folder", str(folder), "--device", "cpu", "--rows", "16", *more]
