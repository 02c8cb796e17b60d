"""The page of SmolLM2 quotes its stored records."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from typing import Any

import pytest

from dms_train.cli.config_source import compose
from research.recipe.report import report_text
from research.recipe.sweep import table
from tests.research.models_page import (
    CHOICES,
    EARLIER,
    H100,
    H200,
    LAMBADA,
    POLICIES,
    ROOT,
    SMOLLM2_PAGE,
    TRIATTENTION,
    check_scores,
    difference,
    interval,
    named,
    needles_of_policies,
    page_rows,
    page_text,
    record,
    score,
)

LENGTHS = ("1024", "2048", "4096", "8192")
MODELS = {
    "original": "original",
    **{f"DMS, CR {ratio}": f"cr{ratio}" for ratio in (2, 3, 4, 6, 8)},
    **{f"window 16, CR {ratio}": f"window_16_cr{ratio}" for ratio in (2, 3, 4, 6, 8)},
    **{f"DMC, CR {ratio}": f"dmc_cr{ratio}" for ratio in (4, 8)},
}
UNTRAINED = POLICIES | {"TriAttention": TRIATTENTION}


def models() -> dict[str, dict[str, Any]]:
    """Models of the page, with DMC and the DMS of the run with window 16, and the policies."""
    before, policies, newest = (
        named(f"smollm2_135m{name}.json") for name in ("_window_16", "_policies", "")
    )
    dms = {f"window_16_{name}" if name in newest else name: before[name] for name in before}
    return dms | {n: m for n, m in policies.items() if m["policy"] != "auto"} | newest


def test_the_page_has_the_numbers_of_the_record() -> None:
    rows, known = page_rows(EARLIER) | page_rows(SMOLLM2_PAGE), models()
    titles = MODELS | {
        f"{title}, CR {ratio}": f"{name}_cr{ratio}"
        for title, name in UNTRAINED.items()
        for ratio in (4, 8)
    }
    for title, name in titles.items():
        model, cells = known[name], rows[title]
        window, continuation = (model["perplexity"][part] for part in ("window", "continuation"))
        validation = model.get("validation")
        assert cells[0] == f"{continuation['cr_factor']:.2f}"
        assert cells[1] == (f"{validation['kl_nats_per_token']:.4f}" if validation else "")
        assert cells[2:4] == [f"{part['perplexity']:.2f}" for part in (window, continuation)]
        assert cells[4:7] == [interval(model["needles"][key]) for key in ("1024", "2048", "4096")]
        assert cells[7] == f"{model['needles']['4096']['reads_per_token']:,.0f}"


def test_the_untrained_methods_are_measured_beside_an_equal_original() -> None:
    text = page_text(SMOLLM2_PAGE)
    run, other = (named(f"smollm2_135m{name}.json") for name in ("", "_policies"))
    own, same = run["original"], other["original"]
    for part in ("window", "continuation"):
        pair = [f"{m['perplexity'][part]['perplexity']:.2f}" for m in (own, same)]
        assert pair[0] == pair[1]
    assert all(same["needles"][key]["value"] == own["needles"][key]["value"] for key in LENGTHS[:3])
    untrained = {n: m for n, m in other.items() if m["policy"] != "auto"}
    nats = same["perplexity"]["window"]["nats"]
    unchanged = {n for n, m in untrained.items() if m["perplexity"]["window"]["nats"] == nats}
    assert set(untrained) - unchanged == {"streaming_llm_cr4", "streaming_llm_cr8"}
    assert "only StreamingLLM changes anything inside a window" in text
    ratios = {n: m["perplexity"]["continuation"]["cr_factor"] for n, m in untrained.items()}
    once = {f"{ratios[f'{n}_cr{r}']:.2f}" for n in ("snapkv", "keydiff", "knorm") for r in (4, 8)}
    assert once == {"2.00", "2.67"}
    assert "Their ratio is therefore 2.00 and 2.67." in text
    most = [n for n, m in untrained.items() if m["needles"]["2048"]["value"] > 0.5 and "cr4" in n]
    assert most == ["quest_cr4"]
    needles = needles_of_policies()
    whole = {
        (title, ratio): f"{100 * needles[f'{name}_cr{ratio}']['8192']['value']:.0f}"
        for title, name in UNTRAINED.items()
        for ratio in (4, 8)
    }
    listed = ("StreamingLLM", "SnapKV", "H2O", "R-KV", "TriAttention", "KeyDiff")
    shown = [f"{title} {whole[title, 4]}" for title in listed]
    reads = untrained["quest_cr8"]["needles"]["8192"]["reads_per_token"]
    later = ("TOVA finds", "StreamingLLM", "SnapKV", "H2O", "R-KV", "TriAttention")
    later = [f"{title} {whole[title.partition(' ')[0], 8]}" for title in later]
    (dms,) = (m for m in record("smollm2_135m_needles.json")["models"] if m["name"] == "cr8")
    of_dms = dms["needles"]["8192"]
    assert untrained["quest_cr8"]["needles"]["8192"]["value"] > of_dms["value"]
    assert reads > of_dms["reads_per_token"]
    for sentence in (
        f"at CR 4 Quest, which holds all tokens, finds {whole['Quest', 4]} of them, "
        f"TOVA {whole['TOVA', 4]}, {', '.join(shown)} and Knorm none.",
        f"At CR 8 Quest finds {whole['Quest', 8]}, with {reads:,.0f} KV reads: more than DMS, with",
        f"There {', '.join(later)}, KeyDiff {whole['KeyDiff', 8]} and Knorm none.",
    ):
        assert sentence in text
    assert whole["Knorm", 4] == whole["Knorm", 8] == "0"


def test_runs_of_the_untrained_methods_differ_as_the_page_says() -> None:
    one, other = (
        {m["name"]: m["needles"] for m in record(f"smollm2_135m_{name}.json")["models"]}
        for name in ("policies", "window_16")
    )
    change = {
        (name, key): round(100 * (other[name][key]["value"] - one[name][key]["value"]))
        for name in (f"{method}_cr{ratio}" for method in POLICIES.values() for ratio in (4, 8))
        for key in LENGTHS[:3]
    }
    first = change.pop(("tova_prefill_dense_cr4", "2048"))
    assert (
        f"found {first} more needles with TOVA at CR 4 in 2,048 tokens, and up to "
        f"{max(map(abs, change.values()))} more or fewer in all other cells."
    ) in page_text(SMOLLM2_PAGE)


def test_needles_in_the_whole_context_are_those_of_the_record() -> None:
    found, rows, text = (
        record("smollm2_135m_needles.json"),
        page_rows(SMOLLM2_PAGE),
        page_text(SMOLLM2_PAGE),
    )
    known = {model["name"]: model for model in found["models"]}
    assert list(known) == ["original", *(f"cr{ratio}" for ratio in (2, 3, 4, 6, 8))]
    for name, model in known.items():
        continuation, needles = model["perplexity"]["continuation"], model["needles"]
        assert rows["whole context, " + name.replace("cr", "CR ")] == [
            f"{continuation['cr_factor']:.2f}",
            f"{continuation['perplexity']:.2f}",
            *(interval(needles[key]) for key in ("1024", "2048", "4096", "8192")),
            f"{needles['8192']['reads_per_token']:,.0f}",
        ]
    printed = report_text(found)
    for name, model in known.items():
        window, continuation = (model["perplexity"][part] for part in ("window", "continuation"))
        cells = (window["perplexity"], continuation["perplexity"], continuation["cr_factor"])
        assert f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |" in printed
    share = {name: model["needles"]["8192"]["value"] for name, model in known.items()}
    middle = [round(100 * share[name]) for name in ("cr2", "cr3", "cr4", "cr6")]
    error = math.sqrt(sum(p * (1 - p) for p in (share["original"], share["cr8"])) / 100)
    reads = [known[n]["needles"]["8192"]["reads_per_token"] for n in ("original", "cr6", "cr8")]
    assert [round(reads[0] / each) for each in reads[1:]] == [7, 9]
    for name in ("cr2", "cr3", "cr4", "cr6"):
        ends = [known[n]["needles"]["8192"] for n in ("original", name)]
        assert max(end["low"] for end in ends) < min(end["high"] for end in ends)
    for sentence in (
        f"the original itself finds {100 * share['original']:.0f} of 100 needles: "
        f"{_found_by_depth(found, 'original', 'in the first half of the prompt')}.",
        f"CR 2 to CR 6 find {min(middle)} to {max(middle)}, which 100 prompts do not separate from",
        "CR 6 does so with a seventh of the KV reads.",
        f"**CR 8** finds {100 * share['cr8']:.0f} of them, "
        f"{100 * (share['original'] - share['cr8']):.0f} points fewer than the original, with a "
        f"standard error of {100 * error:.0f} (not paired), and with a ninth of the KV reads: "
        f"{_found_by_depth(found, 'cr8', 'in the first half')}.",
        "8,192 tokens, the model's whole context and four times the length of the training",
    ):
        assert sentence in text
    assert text.endswith(f"Measured at: {found['commit'][:7]}, {found['date']}.")


def _found_by_depth(record: Mapping[str, Any], model: str, first: str) -> str:
    """Return how many needles in 8,192 tokens a model finds, as the page says it."""
    cells = {
        cell["depth"]: (round(cell["accuracy"] * cell["documents"]), cell["documents"])
        for cell in record["needles"]
        if (cell["label"], cell["length"]) == (model, 8192)
    }
    half = [sum(cells[depth][n] for depth in (0, 21, 41)) for n in (0, 1)]
    assert cells[81][0] == cells[81][1]
    later = f"{cells[61][0]} of {cells[61][1]} at 61 %"
    later += " of its length" if model == "original" else ""
    return f"{half[0]} of {half[1]} {first}, {later}, and all {cells[81][0]} at 81 %"


def test_needles_of_runs_of_the_recipe_differ_as_the_pages_say() -> None:
    names = ("smollm2_135m.json", "smollm2_135m_first.json", "smollm2_135m_needles.json")
    runs = [named(name) for name in names]
    needles = [{name: m["needles"] for name, m in run.items()} for run in runs]
    found = [round(100 * run["cr8"]["4096"]["value"]) for run in needles]
    (original,) = {round(100 * run["original"]["4096"]["value"]) for run in needles}
    whole = [round(100 * needles[2][name]["8192"]["value"]) for name in ("original", "cr8", "cr4")]
    lost = (
        f"loses {original - max(found)} to {original - min(found)} points at twice in [three runs]"
    )
    science = page_text("docs/science.md")
    assert lost in science
    assert f"and {whole[0] - whole[1]} (textbooks) and" in science
    assert f"(code) of the original's {whole[0]} at [four times]" in science
    earlier = "CR 8 found {:.2f} in the third run, {:.2f} in the first, and {:.2f} in [a later one]"
    assert earlier.format(*(share / 100 for share in found)) in page_text(EARLIER)
    changes = page_text("CHANGELOG.md")
    assert f"three runs find {min(found)} to {max(found)} % of needles" in changes
    assert "the original finds {0} of 100, CR 4 {2} and CR 8 {1}".format(*whole) in changes
    most = max(
        abs(needles[0][name][key]["value"] - needles[2][name][key]["value"])
        for name in needles[2]
        for key in ("1024", "2048", "4096")
    )
    perplexities = max(
        abs(one["perplexity"]["continuation"]["perplexity"] - other)
        for one, other in (
            (runs[0][name], model["perplexity"]["continuation"]["perplexity"])
            for name, model in runs[2].items()
        )
    )
    assert (
        f"by at most {100 * most:.0f} points. The perplexity of continuations differs by at most "
        f"{perplexities:.2f}."
    ) in page_text(SMOLLM2_PAGE)


@pytest.mark.parametrize(("name", "first"), [("", "tasks"), ("_defaults", "tasks, defaults")])
def test_the_page_has_the_scores_of_the_record(name: str, first: str) -> None:
    rows = page_rows(SMOLLM2_PAGE)
    for model in record(f"smollm2_135m{name}.json")["models"]:
        title = f"{first}, " + model["name"].replace("cr", "CR ")
        check_scores(rows[title], model)


def test_the_page_has_three_runs() -> None:
    rows = page_rows(EARLIER)
    runs = [record(f"smollm2_135m{name}.json")["models"] for name in ("", "_second", "_first")]
    for same in zip(*(models[1:] for models in runs), strict=True):
        (name,) = {model["name"] for model in same}
        cells: list[str] = []
        for model in same:
            window, continuation = (model["perplexity"][p] for p in ("window", "continuation"))
            cells.append(f"{continuation['cr_factor']:.2f}")
            cells.append(f"{model['validation']['kl_nats_per_token']:.4f}")
            cells += [f"{part['perplexity']:.2f}" for part in (window, continuation)]
            needles = model["needles"].get("4096")
            cells.append(f"{needles['value']:.2f}" if needles else "")
        assert rows[name.replace("cr", "runs, CR ")] == cells
    text = page_text(EARLIER)
    for model in runs[1]:
        if model["name"] in ("cr4", "cr8"):
            for key in CHOICES[:2]:
                assert difference(model["tasks"][key]["difference"]) in text


def test_the_page_has_the_scores_with_window_16() -> None:
    rows = page_rows(EARLIER)
    known = named("smollm2_135m_window_16.json")
    titles = {title: name for title, name in MODELS.items() if not title.startswith("window")}
    for title, name in titles.items():
        if "tasks" not in (model := known[name]):
            continue
        cells = rows["the original" if name == "original" else title.replace(",", " at")]
        scores = {key: score(model["tasks"].get(key)) for key in (*CHOICES, *LAMBADA)}
        assert cells[:6] == [scores[key] for key in CHOICES]
        assert cells[7:] == [scores[key] for key in LAMBADA]
        whole = all(scores[key] for key in CHOICES)
        mean = statistics.fmean(model["tasks"][key]["score"] for key in CHOICES) if whole else None
        assert cells[6] == ("" if mean is None else f"{100 * mean:.2f}")


def test_the_page_has_the_control_of_the_sweep() -> None:
    """Distillation without eviction, of the short runs."""
    text = page_text(SMOLLM2_PAGE)
    (row,) = (
        row for row in record("smollm2_sweep.json", H100)["rows"] if row["variant"] == "no-eviction"
    )
    assert (
        f"has perplexity {row['window']['perplexity']:.2f}, and "
        f"{row['continuation']['perplexity']:.2f} of continuations. It finds "
        f"{row['needles_2048'][0]:.2f} of the needles in 2,048 tokens and "
        f"{row['needles_4096'][0]:.2f} in 4,096."
    ) in text


def test_the_page_has_the_published_scores() -> None:
    text = page_text(SMOLLM2_PAGE)
    found = json.loads((ROOT / "dms_train/assets/published_scores.json").read_text("utf-8"))
    lighteval, harness = (
        {s["task"]: f"{100 * s['value']:.1f}" for s in scores if s["settings"].startswith(kind)}
        for scores in (found["SmolLM2-135M-Instruct"],)
        for kind in ("lighteval", "lm-eval")
    )
    assert (
        f"of the original are {lighteval['hellaswag']} % of HellaSwag and {lighteval['piqa']} % of "
        f"PIQA in its model card (lighteval), and {harness['hellaswag']} and {harness['piqa']} %, "
        f"with {harness['arc_easy']} % of ARC-Easy and {harness['arc_challenge']} % of "
        "ARC-Challenge, in a third party's (lm-eval). They are without examples, and with the "
        f"weights before quantisation. The card also has {lighteval['gsm8k']} % of GSM8K."
    ) in text


COSTS = {  # record and variant
    "quality, 10.8 million": ("window_64", "25-steps-per-unit"),
    "quality, 17.7 million": ("window_64", "base"),
    "quality, 17.7 million again": ("losses", "base"),
    "quality, 98.3 million": ("losses", "400-steps-per-unit"),
    "quality, 334.2 million": ("long", "1500-steps-per-unit"),
}


def test_the_page_has_tokens_and_minutes_against_quality() -> None:
    rows, training = page_rows(SMOLLM2_PAGE), record("smollm2_135m.json")["trainings"]["train"]
    speed = training["tokens"] / training["minutes"]
    assert [name for name in rows if name.startswith("quality,")] == list(COSTS)
    found = []
    for title, (name, variant) in COSTS.items():
        sweep = record(f"smollm2_sweep_{name}.json")["rows"]
        (row,) = (row for row in sweep if row["variant"] == variant)
        assert f"{row['tokens'] / 1e6:.1f} million" in title
        assert rows[title] == [
            f"{row['tokens'] / speed:.1f}",
            f"{row['kl']:.4f}",
            f"{row['continuation']['cr_factor']:.2f}",
            f"{row['continuation']['perplexity']:.2f}",
            "{:.2f} [{:.2f}, {:.2f}]".format(*row["needles_4096"]),
        ]
        found.append(row)
    kl = [row["kl"] for row in found[1:]]
    assert kl == sorted(kl, reverse=True)
    longest = (found[-2], found[-1])
    shorter = min(row["continuation"]["perplexity"] for row in found[1:3])
    assert all(row["continuation"]["perplexity"] > shorter - 0.005 for row in longest)
    assert all(row["needles_4096"][0] <= found[2]["needles_4096"][0] for row in longest)


def test_the_page_has_the_speed_of_training() -> None:
    text, training = page_text(SMOLLM2_PAGE), record("smollm2_135m.json")["trainings"]["train"]
    speed = training["tokens"] / training["minutes"] / 60
    branches = training["tokens_of_held_exports"] / speed / 60
    minutes = 3.4 + training["minutes"] + branches
    assert f"at {round(speed, -3):,.0f} tokens/s, on an H200" in text
    assert f"The parts sum to {minutes:.1f}, without the starts" in text
    stage = compose(["experiment=smollm2_135m", "stage.retrofit.target_cr=4"]).stage
    parts = (stage.zero_neuron.steps, 3 * stage.retrofit.steps_per_cr, stage.hold.steps)
    size = training["tokens"] / training["steps"]
    assert (
        "The {} steps to CR 4 ({} of zeroing, {} of annealing, {} of hold) take {:.1f} minutes at "
        "that rate."
    ).format(sum(parts), *parts, sum(parts) * size / speed / 60) in text


def test_the_records_print() -> None:
    for device in (H100, H200):
        assert "| cr8 |" in report_text(record("smollm2_135m.json", device))
        assert "| base |" in table(record("smollm2_sweep.json", device))
    for name in ("second", "first"):
        assert "| cr8 |" in report_text(record(f"smollm2_135m_{name}.json"))
