"""The page of models and the README quote the stored records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research.recipe.report import report_text
from research.recipe.sweep import table

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "research" / "results" / "nvidia_h100_80gb_hbm3"
MODELS = {
    "original": "original",
    **{f"DMS, CR {ratio}": f"cr{ratio}" for ratio in (2, 3, 4, 6, 8)},
    **{
        f"{title}, CR {ratio}": f"{name}_cr{ratio}"
        for title, name in (
            ("StreamingLLM", "streaming_llm"),
            ("SnapKV", "snapkv"),
            ("KeyDiff", "keydiff"),
        )
        for ratio in (4, 8)
    },
}
VARIANTS = {"none": "base", "eviction channel 0": "channel-0", "learning rate 5e-5": "lr-5e-5"}


def record(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


def page_rows(page: str) -> dict[str, list[str]]:
    """Return the cells of every table row by the first cell up to a colon."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    return {row[0].partition(":")[0]: row[1:] for row in cells}


def interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def test_the_page_has_the_numbers_of_the_record() -> None:
    rows = page_rows("docs/models.md")
    models = {model["name"]: model for model in record("smollm2_135m.json")["models"]}
    for title, name in MODELS.items():
        model, cells = models[name], rows[title]
        perplexity, validation = model["perplexity"], model.get("validation")
        assert cells[0] == f"{perplexity['continuation']['cr_factor']:.2f}"
        assert cells[1] == (f"{validation['kl_nats_per_token']:.4f}" if validation else "")
        assert cells[2] in (f"{perplexity['window']['perplexity']:.2f}", "")
        assert cells[3] == f"{perplexity['continuation']['perplexity']:.2f}"
        assert cells[4:] == [interval(model["needles"][key]) for key in ("1024", "2048", "4096")]


def test_the_readme_has_the_numbers_of_the_record() -> None:
    rows = page_rows("README.md")
    models = {model["name"]: model for model in record("smollm2_135m.json")["models"]}
    shown = [models[n] for n in ("original", "cr4", "cr8", "streaming_llm_cr4", "snapkv_cr4")]
    by_title = {
        "perplexity of": lambda m: f"{m['perplexity']['continuation']['perplexity']:.2f}",
        "needles found in 2,048": lambda m: f"{m['needles']['2048']['value']:.2f}",
        "needles found in 4,096": lambda m: f"{m['needles']['4096']['value']:.2f}",
        "tokens that a": lambda m: f"{m['needles']['4096']['reads_per_token']:,.0f}",
    }
    for title, number in by_title.items():
        (cells,) = (row for name, row in rows.items() if name.startswith(title))
        assert cells == [number(model) for model in shown]


def test_the_variants_have_the_numbers_of_the_sweep() -> None:
    rows = page_rows("docs/models.md")
    variants = {row["variant"]: row for row in record("smollm2_sweep.json")["rows"]}
    for title, name in VARIANTS.items():
        row, cells = variants[name], rows[title]
        assert cells[0] == f"{row['kl']:.4f}"
        assert cells[1] == f"{row['window']['perplexity']:.2f}"
        assert cells[2] == f"{row['continuation']['perplexity']:.2f}"
        for cell, key in zip(cells[3:], ("needles_2048", "needles_4096"), strict=True):
            assert cell == "{:.2f} [{:.2f}, {:.2f}]".format(*row[key])


def test_both_records_print() -> None:
    assert "| cr8 |" in report_text(record("smollm2_135m.json"))
    assert "| lr-5e-5 |" in table(record("smollm2_sweep.json"))
