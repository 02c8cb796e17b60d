"""The benchmark of prompts under policies, on a CPU: what it holds, and how it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import policies_prefill
from benchmarks.__main__ import main
from benchmarks.records import RESULTS, ROOT

BUDGET, CONTEXT = 16, 64


def test_policies_hold_their_budget_after_a_prompt(tmp_path: Path) -> None:
    names = ("dms", "keep_all", "snapkv", "tova", "quest")
    sizes = ("--sequences", "2", "--context", str(CONTEXT), "--cr", "4", "--shape", "small")
    assert main(["policies_prefill", *names, "--output", str(tmp_path), *sizes]) == 0
    (file,) = tmp_path.glob("*/policies_prefill.json")
    record = json.loads(file.read_text())
    assert (record["shape"], record["sequences"], record["budget"]) == ("small", 2, BUDGET)
    found = {case["policy"]: case for case in record["cases"]}
    live = {name: case["live"] for name, case in found.items()}
    # DMS keeps its window, which is longer than these prompts
    held = dict.fromkeys(("dms", "keep_all", "quest"), CONTEXT)
    assert live == held | dict.fromkeys(("snapkv", "tova"), BUDGET)
    assert found["tova"]["options"] == ["prefill=dense"]
    for case in found.values():
        low, high = case["prefill_tok_s_spread"]
        assert low <= case["prefill_tok_s"] <= high


def test_the_table_compares_with_dms() -> None:
    sizes = {"shape": "small", "sequences": 2, "context": 64, "budget": 16}
    speeds = {"dms": (2000, [1900, 2100]), "h2o": (1500, [1000, 1600])}
    rows = [
        {"policy": name, "prefill_tok_s": speed, "prefill_tok_s_spread": spread, "live": 16.0}
        for name, (speed, spread) in speeds.items()
    ]
    rows[1]["options"] = ["prefill=dense"]
    lines = policies_prefill.tables({**sizes, "cases": rows}).splitlines()
    assert lines[0] == "small, 2 prompts of 64 tokens, 16 of them in a budget"
    assert lines[-2:] == [
        "| `dms` | 2,000 (1,900 to 2,100) | 1.000 | 16.0 |",
        "| `h2o:prefill=dense` | 1,500 (1,000 to 1,600) | 0.750 | 16.0 |",
    ]


@pytest.mark.parametrize(
    "words",
    [
        *(["lru"], ["--shape", "large"], ["--repeats", "2"], ["--sequences", "0"]),
        *(["--context", "-3"], ["--cr", "0.5"], ["--context", "64", "--cr", "65.0"]),
    ],
)
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["policies_prefill", *words])
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_the_page_says_how_fast_methods_read_prompts() -> None:
    text = " ".join((ROOT / "docs/performance/serving.md").read_text("utf-8").split())
    small, large = (
        {case["policy"]: case["prefill_tok_s"] for case in record["cases"]}
        for record in (
            json.loads((RESULTS / "nvidia_h200" / f"policies_prefill{name}.json").read_text())
            for name in ("", "_llama_3_1_8b")
        )
    )
    evicting = [name for name in small if name not in ("dms", "keep_all", "quest")]
    slow = [small[name] / small["dms"] for name in evicting]
    fast = {name: large[name] / large["dms"] for name in evicting}
    named = [f"{fast.pop(name):.2f}" for name in ("snapkv", "keydiff", "knorm")]
    for sentence in (
        f"without eviction is {100 * (small['keep_all'] / small['dms'] - 1):.0f} % faster than DMS",
        f"reach {min(slow):.2f} to {max(slow):.2f} of the speed of DMS, SnapKV "
        f"{small['snapkv'] / small['dms']:.2f}.",
        f"SnapKV reaches {named[0]}, KeyDiff and Knorm {named[1]} and {named[2]}, and the other "
        f"four {min(fast.values()):.2f} to {max(fast.values()):.2f}.",
    ):
        assert sentence in text
    assert len(fast) == 4
