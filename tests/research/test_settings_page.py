"""The page of settings quotes the stored records of short runs of SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.research.models_page import (
    H100,
    H200,
    PAGE,
    SETTINGS,
    page_rows,
    page_text,
    record,
)

VARIANTS = {
    "none": (H100, "base"),
    "eviction channel 0": (H100, "channel-0"),
    "learning rate 5e-5": (H100, "lr-5e-5"),
    "all, learning rate 2e-4": (H200, "base"),
    "attention, learning rate 2e-4": (H200, "train-attention"),
    "adapters (`lora`, rank 16), learning rate 1e-3": (H200, "train-lora"),
}
GATES = {
    "not trained": "original",
    "DMS, window 16": "base",
    "DMS, window 64": "window-64",
    "DMS, window 256": "window-256",
    "TRIM-KV, a budget at CR 4": "trim-kv",
    "KVzap, threshold exp(-5)": "kvzap",
    **{f"KVzap, threshold exp(-{offset})": f"kvzap-offset-{offset}" for offset in (4.5, 4, 3.5)},
}
ZEROING = {
    "no change": "base",
    "learning rate 1e-5": "lr-1e-5",
    "eviction channels alone (`channel`), learning rate 1e-3": "train-channel",
    "samples of 4,096 tokens, half as many": "samples-of-4k-tokens",
    "10 zeroing steps, not 60": "zeroing-in-10-steps",
    "240 zeroing steps": "zeroing-in-240-steps",
}
LOSSES = {
    "the original of these runs": "original",
    "no change to the loss or the tokens": "base",
    "400 steps for each unit of the ratio, 240 of hold": "400-steps-per-unit",
    "`loss.kl_direction=student_teacher`": "KL-from-the-student",
    "`loss.kl_temperature=2`": "temperature-2",
}
LONG = {"1,500 steps for each unit of the ratio, 540 of hold": "1500-steps-per-unit"}
WINDOW_64 = {
    "window 64, learning rate 2e-4": "base",
    "25 steps for each unit of the ratio, not 50": "25-steps-per-unit",
    "learning rate 1e-4": "lr-1e-4",
    "learning rate 5e-4": "lr-5e-4",
}
TEXTS = {
    "plain text": "base",
    "its first four tokens stay": "sinks",
    "half of the text is the model's own": "both-texts",
}
STORED = {"a live original": "base", "a stored original, 64 tokens": "stored-teacher"}
OWN_TEXT = {
    "plain text, beside the next": "base",
    "the model's own text alone": "text-of-the-model",
}
CHANNELS = {
    "original of the runs on the library": "original",
    "`method.channel=auto`": "base",
    "the last channel": "last-channel",
    "`method=dms_fastdms`": "fastdms",
    "TRIM-KV on the library, a budget at CR 4": "trim-kv",
    "TRIM-KV on the library, a budget at CR 8": "trim-kv-cr-8",
}
DMS = "docs/concepts/dms.md"
FP8 = {"all products in bf16": "bf16-layers", "MLPs and output projections in FP8": "fp8"}


def test_the_variants_have_the_numbers_of_the_sweep() -> None:
    rows = page_rows(SETTINGS)
    for title, (device, name) in VARIANTS.items():
        found = record("smollm2_sweep.json", device)["rows"]
        (row,) = (row for row in found if row["variant"] == name)
        kl, *cells = rows[title]
        if device == H200:
            assert cells.pop(0) == f"{row['window']['cr_factor']:.2f}"
        assert kl == f"{row['kl']:.4f}"
        assert cells[0] == f"{row['window']['perplexity']:.2f}"
        assert cells[1] == f"{row['continuation']['perplexity']:.2f}"
        for cell, key in zip(cells[2:], ("needles_2048", "needles_4096"), strict=True):
            assert cell == "{:.2f} [{:.2f}, {:.2f}]".format(*row[key])


def test_gates_and_windows_are_those_of_the_record() -> None:
    found = {row["variant"]: row for row in record("smollm2_sweep_gates.json")["rows"]}
    rows = page_rows(SETTINGS)
    assert set(found) == set(GATES.values())
    for title, name in GATES.items():
        row, cells = found[name], rows[title]
        parts = (("continuation", "cr_factor"), ("window", "perplexity"))
        parts += (("continuation", "perplexity"),)
        for cell, (part, key) in zip(cells[:3], parts, strict=True):
            assert cell == (f"{row[part][key]:.2f}" if part in row else "")
        assert cells[3:] == _found(row)


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        *(("window_64", WINDOW_64), ("zeroing", ZEROING), ("losses", LOSSES)),
        *(("own_text", OWN_TEXT), ("long", LONG)),
    ],
)
def test_short_runs_with_window_64_are_those_of_the_record(
    name: str, titles: dict[str, str]
) -> None:
    found = {row["variant"]: row for row in record(f"smollm2_sweep_{name}.json")["rows"]}
    rows = page_rows(SETTINGS)
    assert set(found) - {"original"} == set(titles.values()) - {"original"}
    for title, variant in titles.items():
        row = found[variant]
        cells = ["", ""]
        if variant != "original":
            cells = [f"{row['tokens'] / 1e6:.1f}", f"{row['kl']:.4f}"]
        cells.append(_ratio(row))
        cells += [f"{row[part]['perplexity']:.2f}" for part in ("window", "continuation")]
        assert rows[title] == [*cells, *_found(row)]


def test_the_page_states_what_zeroing_and_the_channel_alone_change() -> None:
    found = {row["variant"]: row for row in record("smollm2_sweep_zeroing.json")["rows"]}
    alone, base = found["train-channel"], found["base"]
    zeroed = [base, found["zeroing-in-10-steps"], found["zeroing-in-240-steps"]]
    perplexities = [row["continuation"]["perplexity"] for row in zeroed]
    more = alone["continuation"]["perplexity"] - base["continuation"]["perplexity"]
    missed = 100 * (base["needles_4096"][0] - alone["needles_4096"][0])
    for sentence in (
        f"they differ by {max(perplexities) - min(perplexities):.2f} in perplexity",
        f"the ratio reaches {alone['continuation']['cr_factor']:.1f}",
        f"continuations is {more:.2f} higher",
        f"{missed:.0f} more of 100 needles are missed in 4,096 tokens",
        f"the ratio stays at {found['lr-1e-5']['continuation']['cr_factor']:.1f}",
    ):
        assert sentence in page_text(SETTINGS)


def test_the_page_states_what_longer_training_changes() -> None:
    found = {row["variant"]: row for row in record("smollm2_sweep_losses.json")["rows"]}
    longer, base = found["400-steps-per-unit"], found["base"]
    text = page_text(SETTINGS)
    ratios = [row["continuation"]["cr_factor"] for row in (longer, base)]
    perplexities = [row["continuation"]["perplexity"] for row in (longer, base)]
    assert f"lower the KL by {100 * (1 - longer['kl'] / base['kl']):.0f} %" in text
    assert f"differs by {perplexities[0] - perplexities[1]:.2f}, at a ratio" in text
    assert f"at a ratio {100 * (1 - ratios[0] / ratios[1]):.0f} % lower" in text
    assert longer["needles_4096"] == base["needles_4096"]
    assert longer["needles_2048"] == base["needles_2048"]
    for name in ("KL-from-the-student", "temperature-2"):  # as two equal runs differ
        assert abs(found[name]["continuation"]["perplexity"] - perplexities[1]) < 0.1


def test_the_page_states_what_the_longest_training_changes() -> None:
    found = {row["variant"]: row for row in record("smollm2_sweep_losses.json")["rows"]}
    (longest,) = (
        r for r in record("smollm2_sweep_long.json")["rows"] if r["variant"] in LONG.values()
    )
    base, runs, text = found["base"], (found["400-steps-per-unit"], longest), page_text(SETTINGS)
    tokens = [f"{row['tokens'] / 1e6:.1f}" for row in runs]
    ratios = [f"{row['continuation']['cr_factor']:.1f}" for row in runs]
    less = [f"{100 * (1 - row['kl'] / base['kl']):.0f}" for row in runs]
    named = "{} and {} million end at ratios of {} and {}, with {} and {} % less KL"
    assert named.format(*tokens, *ratios, *less) in text
    assert f"**{tokens[1]} million tokens**, {longest['tokens'] / 8_008_972:.0f} times" in text
    assert f"lower the KL by {less[1]} % against the {base['tokens'] / 1e6:.1f} million" in text
    both = [row["continuation"] for row in (longest, base)]
    assert f"{both[0]['perplexity']:.2f}" == f"{both[1]['perplexity']:.2f}"
    lower = 100 * (1 - both[0]["cr_factor"] / both[1]["cr_factor"])
    assert (
        f"Perplexity of continuations is the same, at a ratio {lower:.0f} % lower, and one needle "
        "of 100 differs at each length."
    ) in text
    for key in ("needles_2048", "needles_4096"):
        assert round(100 * abs(longest[key][0] - base[key][0])) == 1
    found = record("smollm2_sweep_long.json")
    measured_at = f"{found['commit'][:7]}, {found['date']} ({tokens[1]} million tokens)."
    assert f"Measured at: cd57c5b, 2026-11-30, and {measured_at}" in text
    not_yet = page_text(PAGE).partition("## Not yet measured")[2]
    assert f"more than {longest['tokens'] / 1e6:.0f} million tokens" in not_yet


def test_the_page_states_what_the_models_own_text_changes() -> None:
    found = {row["variant"]: row for row in record("smollm2_sweep_own_text.json")["rows"]}
    own, base = (found[name]["continuation"] for name in ("text-of-the-model", "base"))
    lower = 100 * (1 - own["cr_factor"] / base["cr_factor"])
    assert f"ends at a ratio {lower:.0f} % lower" in page_text(SETTINGS)
    text = page_text(SETTINGS)
    assert "Perplexity and needles differ no more than those of two equal runs. Each KL" in text
    assert f"own alone ends at a ratio of {own['cr_factor']:.1f}" in text
    assert abs(own["perplexity"] - base["perplexity"]) < 0.1  # as two equal runs differ


def test_the_rows_of_the_last_channel_are_those_of_the_record() -> None:
    found = {row["variant"]: row for row in record("smollm2_sweep_channels.json")["rows"]}
    rows = page_rows(SETTINGS)
    assert set(found) == set(CHANNELS.values())
    for title, name in CHANNELS.items():
        row = found[name]
        known = "continuation" in row  # TRIM-KV's perplexity was not measured
        cells = [f"{row['kl']:.4f}" if "kl" in row else ""]
        cells.append(_ratio(row) if known else "")
        parts = ("window", "continuation")
        cells += [f"{row[part]['perplexity']:.2f}" if known else "" for part in parts]
        assert rows[title] == [*cells, *_found(row, "needles_1024", "needles_2048", "needles_4096")]


def test_the_pages_state_what_the_last_channel_costs() -> None:
    found = {row["variant"]: row for row in record("smollm2_sweep_channels.json")["rows"]}
    base, last, theirs = (found[name] for name in ("base", "last-channel", "fastdms"))

    def more(row: Mapping[str, Any]) -> tuple[str, str]:
        lost = row["continuation"]["perplexity"] - base["continuation"]["perplexity"]
        missed = 100 * (base["needles_4096"][0] - row["needles_4096"][0])
        return f"{lost:.2f}", f"{missed:.0f}"

    lost, missed = more(last)
    text = page_text(SETTINGS)
    for page, sentence in (
        (
            SETTINGS,
            f"perplexity {lost} higher with the last one, which misses {missed} more of 100",
        ),
        (SETTINGS, f"costs {lost} of perplexity of continuations, and {missed} of 100 needles in"),
        ("docs/science.md", f"the last channel misses {missed} more of 100 needles."),
        (DMS, f"loses {lost} of perplexity and {missed} of 100 needles in 4,096 tokens beside"),
    ):
        assert sentence in page_text(page)
    lost, missed = more(theirs)
    assert f"it loses {lost} of perplexity, and {missed} needles in 4,096 tokens" in text
    assert f"`method=dms_fastdms` {lost} and {missed}, in one training each." in page_text(DMS)
    read = {f"{row['tokens'] / 1e6:.1f}" for row in found.values() if "tokens" in row}
    assert f"Each training read {read.pop()} million tokens" in text
    assert not read
    low = last["needles_4096"][0] - theirs["needles_4096"][0]
    assert 0 < low < 1.96 * (0.83 * 0.17 / 100 + 0.78 * 0.22 / 100) ** 0.5
    for row in (last, theirs):  # intervals apart from that of `auto`
        assert row["needles_4096"][2] < base["needles_4096"][1]
    assert {f"{row['cr']:.1f}" for row in (base, last, theirs)} == {"3.9", "4.0"}
    assert "All rows of DMS reach 3.9 to 4.0 on the library" in text
    gates = record("smollm2_sweep_gates.json")["rows"]
    (before,) = (row["needles_2048"][0] for row in gates if row["variant"] == "trim-kv")
    shares = (found["trim-kv"]["needles_2048"][0], before, found["trim-kv-cr-8"]["needles_2048"][0])
    said = "finds {:.2f} of the needles in 2,048 tokens at CR 4, and [{:.2f} with gates trained on"
    assert said.format(*shares) in text
    assert f"At CR 8 it finds {shares[2]:.2f}." in text
    files = record("smollm2_sweep_channels.json")
    assert f"Measured at: {files['commit'][:7]}, {files['date']}." in text


@pytest.mark.parametrize(
    ("name", "titles"), [("texts", TEXTS), ("fp8", FP8), ("stored_teacher", STORED)]
)
def test_other_short_runs_are_those_of_the_record(name: str, titles: dict[str, str]) -> None:
    found = {row["variant"]: row for row in record(f"smollm2_sweep_{name}.json")["rows"]}
    rows = page_rows(SETTINGS)
    assert set(found) - {"original"} == set(titles.values())
    for title, name in titles.items():
        row = found[name]
        cells = [f"{row['kl']:.4f}" if "kl" in row else "", _ratio(row)]
        cells += [f"{row[part]['perplexity']:.2f}" for part in ("window", "continuation")]
        assert rows[title] == [*cells, *_found(row)]


def _ratio(row: Mapping[str, Any]) -> str:
    return f"{row['continuation']['cr_factor']:.2f}"


def _found(row: Mapping[str, Any], *keys: str) -> list[str]:
    """Return the cells of needles, those in 2,048 and 4,096 tokens unless `keys` name others."""
    keys = keys or ("needles_2048", "needles_4096")
    return ["{:.2f} [{:.2f}, {:.2f}]".format(*row[key]) if key in row else "" for key in keys]
