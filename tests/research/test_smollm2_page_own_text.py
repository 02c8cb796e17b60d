"""The page of SmolLM2 quotes the records of the recipe's own text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.research.models_page import (
    CHOICES,
    LAMBADA,
    SMOLLM2_PAGE,
    difference,
    named,
    page_rows,
    page_text,
    record,
)

LENGTHS = ("1024", "2048", "4096", "8192")
RATIOS = ("cr2", "cr3", "cr4", "cr6", "cr8")
TASKS = (*CHOICES, "mmlu@5", *LAMBADA)


def runs() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the models of the recipe's defaults, and of answers alone."""
    both = (record(f"smollm2_135m_{name}.json")["models"] for name in ("defaults", "policies"))
    defaults, alone = ({m["name"]: m for m in models if m["policy"] == "auto"} for models in both)
    return defaults, alone


def needles(model: Mapping[str, Any]) -> dict[str, int]:
    """Return how many of 100 needles a model finds at each length."""
    return {key: round(100 * model["needles"][key]["value"]) for key in LENGTHS}


def test_the_page_has_the_runs_on_the_own_text_of_the_recipe() -> None:
    rows, (defaults, alone) = page_rows(SMOLLM2_PAGE), runs()
    shown = [("defaults", model) for model in defaults.values()]
    shown += [("answers alone", m) for name, m in alone.items() if name != "original"]
    for title, model in shown:
        validation, choices = model.get("validation"), model["choices"]
        continuation = model["perplexity"]["continuation"]
        cells = rows[f"{title}, {model['name'].replace('cr', 'CR ')}"]
        assert cells == [
            f"{continuation['cr_factor']:.2f}",
            f"{validation['kl_nats_per_token']:.4f}" if validation else "",
            f"{continuation['perplexity']:.2f}",
            *(f"{model['needles'][key]['value']:.2f}" for key in LENGTHS),
            f"{100 * choices['score']:.2f}",
            difference(choices["difference"]) if validation else "",
        ]
    assert alone["original"] == defaults["original"]


def test_the_page_says_what_the_defaults_lose() -> None:
    text, (defaults, _) = page_text(SMOLLM2_PAGE), runs()
    found = {name: needles(defaults[name]) for name in ("original", *RATIOS)}
    lost = {
        key: [found["original"][key] - found[name][key] for name in RATIOS[:3]] for key in LENGTHS
    }
    means = [100 * defaults[name]["choices"]["difference"]["value"] for name in RATIOS]
    for name in RATIOS[3:]:
        assert all(found[name][key] >= found["original"][key] for key in LENGTHS[:2])
    assert defaults["cr8"]["choices"]["difference"]["high"] < 0
    books = named("smollm2_135m.json")
    late = [defaults[name]["needles"][key]["value"] for key in LENGTHS[2:] for name in RATIOS[3:]]
    for sentence in (
        f"find at most {max(lost['1024'] + lost['2048'] + lost['4096'])} needles fewer than the "
        f"original in up to 4,096 tokens, and {max(lost['8192'])} fewer in 8,192.",
        f"differ from the original's by {min(means[:3]):+.1f} to {max(means[:3]):+.1f} points.",
        "In 4,096 tokens CR 6 finds {:.2f} of them and CR 8 {:.2f}, and in 8,192 tokens {:.2f} and "
        "{:.2f}.".format(*late),
        f"Multiple choice loses {-means[-1]:.1f} points at CR 8, with an interval below 0.",
        "finds {:.2f} and {:.2f} of the needles in 4,096 tokens at CR 6 and CR 8.".format(
            *(books[name]["needles"]["4096"]["value"] for name in RATIOS[3:])
        ),
    ):
        assert sentence in text
    beyond = f"{found['original']['4096'] - found['cr8']['4096']} in [one with code]"
    further = f"and 18 (textbooks) and {found['original']['8192'] - found['cr8']['8192']} (code)"
    for sentence in (beyond, further):
        assert sentence in page_text("docs/science.md")
    share = f"CR 8 finds {found['cr8']['4096']} of 100 needles in 4,096 tokens"
    assert share in page_text("CHANGELOG.md")


def test_the_page_names_the_tasks_whose_intervals_exclude_zero() -> None:
    text, (defaults, _) = page_text(SMOLLM2_PAGE), runs()
    found = {
        (name, key): defaults[name]["tasks"][key]["difference"] for name in RATIOS for key in TASKS
    }
    outside = {k: each for k, each in found.items() if each["high"] < 0 or each["low"] > 0}
    assert list(outside) == [
        ("cr2", LAMBADA[1]),
        ("cr3", LAMBADA[0]),
        ("cr6", "openbookqa@5"),
        ("cr8", "openbookqa@5"),
    ]
    shown = {name: difference(each) for (name, _), each in outside.items()}
    assert (
        f"Of {len(found)} differences to the original three have intervals below 0 and one above: "
        f"LAMBADA without examples at CR 3, {shown['cr3']}, OpenBookQA at CR 6, {shown['cr6']}, "
        f"and at CR 8, {shown['cr8']}, and LAMBADA with ten examples at CR 2, {shown['cr2']}."
    ) in text


def test_the_page_says_what_the_library_changes() -> None:
    text, both = page_text(SMOLLM2_PAGE), runs()
    found = [{name: needles(run[name]) for name in RATIOS} for run in both]
    more = {key: [found[0][name][key] - found[1][name][key] for name in RATIOS] for key in LENGTHS}
    means = [
        100 * (both[0][n]["choices"]["score"] - both[1][n]["choices"]["score"]) for n in RATIOS
    ]
    early = [abs(each) for key in LENGTHS[:3] for each in more[key][:3]]
    for name in RATIOS:
        kl, other = (run[name]["validation"]["kl_nats_per_token"] for run in both)
        assert kl > other
    for sentence in (
        f"CR 8 finds {more['2048'][4]} more of 100 needles in 2,048 tokens, and CR 6 and CR 8 find "
        f"{more['4096'][3]} and {more['4096'][4]} more in 4,096. At CR 2 to CR 4 the difference is "
        f"at most {max(early)} up to that length. In 8,192 tokens it is {min(more['8192'])} to "
        f"+{max(more['8192'])}.",
        f"is up to {max(means):.1f} points higher and, at CR 8, {-means[4]:.1f} lower. KL is",
    ):
        assert sentence in text
    assert min(means) == means[4]


def test_the_parts_of_the_cost_agree() -> None:
    found = record("smollm2_135m_defaults.json")
    text, steps = page_text(SMOLLM2_PAGE), found["trainings"]["train"]["minutes"]
    ((sampled, generating, speed, hours, library, training, minutes),) = re.findall(
        r"Sampling took (\d+) s, of which (\d+) s generate, at ([\d,]+) tokens/s in 1,024 "
        r"sequences, or ([\d.]+) GPU hours per million tokens. The library took (\d+) s, and the "
        r"training (\d+) s, .* These sum to ([\d.]+) minutes",
        text,
    )
    rate = int(speed.replace(",", ""))
    assert f"{int(generating) * rate / 1e6:.1f} million tokens, and half" in text
    assert f"{1e6 / rate / 3600:.4f}" == hours
    assert f"{(int(sampled) + int(library) + int(training)) / 60:.1f}" == minutes
    assert int(generating) < int(sampled)
    assert 60 * steps < int(training)
    measured = "Measured at: {}, {}, and {}, {} (the last record). The recipe of the first commit"
    records = (found, record("smollm2_135m_policies_8k.json"))
    ends = [each for one in records for each in (one["commit"][:7], one["date"])]
    assert measured.format(*ends) in text
