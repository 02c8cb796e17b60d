"""The attention benchmark on a CPU: what it computes from its times, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.__main__ import main
from benchmarks.attention import accuracy as attention_accuracy
from benchmarks.attention import main as attention
from benchmarks.attention import peers as attention_peers
from benchmarks.attention import train_cases
from benchmarks.attention.shapes import Shape, make_inputs
from dms_train.kernels.train_attention import blockwise

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("results")
    assert main(["attention", "--device", "cpu", "--output", str(out)]) == 0
    (file,) = out.glob("*/attention.json")
    return json.loads(file.read_text())


def test_a_row_holds_times_and_values_derived_from_them(record: dict[str, Any]) -> None:
    assert [case["label"] for case in record["train"]] == [
        shape.label for shape in train_cases.TINY_SHAPES
    ]
    b, hq, _, s, d, _ = train_cases.TINY_SHAPES[0]
    rows = {row["name"]: row for row in record["train"][0]["rows"]}
    assert list(rows) == ["SDPA causal", "materialised", "blockwise", "reference"]
    row = rows["blockwise"]
    forward, backward = row["forward_ms"], row["backward_ms"]
    for times in (forward, backward):
        assert 0 < times["low"] <= times["median"] <= times["high"]
    assert row["total_ms"] == pytest.approx(forward["median"] + backward["median"])
    # 2 products of 2 b hq s^2 d operations, of which the causal half is done; 5 in the backward
    products = b * hq * s * s * d
    assert row["forward_flops_per_s"] == pytest.approx(2 * products / forward["median"] * 1e3)
    assert row["backward_flops_per_s"] == pytest.approx(5 * products / backward["median"] * 1e3)
    ratio = next(r for r in record["train"][0]["ratios"] if r["name"] == "blockwise")
    peer, dense = rows["materialised"]["total_ms"], rows["SDPA causal"]["total_ms"]
    assert ratio["speedup"] == pytest.approx(peer / row["total_ms"])
    assert ratio["time_over_dense"] == pytest.approx(row["total_ms"] / dense)


def test_the_record_states_its_origin(record: dict[str, Any]) -> None:
    assert record["device"].startswith("CPU")
    assert record["versions"]["torch"] == torch.__version__
    assert record["valid"] is None
    assert record["ceilings"]["copy_bytes_per_s"] > 1e8
    assert record["ceilings"]["gemm_flops_per_s"] > 1e8


def test_the_best_flex_variant_is_the_peer() -> None:
    rows = [
        {"name": "cuDNN causal", "kind": "dense", "total_ms": 2.0},
        {"name": "flex DMS", "kind": "peer", "total_ms": 6.0},
        {"name": "flex DMS, log_keep", "kind": "peer", "total_ms": 5.0},
        {"name": "materialised", "kind": "peer", "total_ms": 1.0},
        {"name": "reference", "kind": "ours", "skipped": "too large"},
        {"name": "ours: triton", "kind": "ours", "total_ms": 2.5},
    ]
    (ratio,) = train_cases.ratios(rows)
    assert (ratio["name"], ratio["peer"]) == ("ours: triton", "flex DMS, log_keep")
    assert (ratio["speedup"], ratio["time_over_dense"]) == (2.0, 1.25)


def run_of(device: str, forward: float, backward: float) -> dict[str, Any]:
    row = {
        "name": "flex DMS",
        "kind": "peer",
        "forward_ms": {"median": forward},
        "backward_ms": {"median": backward},
    }
    ours = {"name": "ours: triton", "kind": "ours", "forward_ms": {"median": 9.0}}
    skipped = {"name": "materialised", "skipped": "too large"}
    return {"device": device, "train": [{"label": "shape", "rows": [row, ours, skipped]}]}


RECORDED = {
    "device": "this",
    "train": {"shape": {"flex DMS": [1.0, 2.0], "materialised": [1.0, 1.0]}},
}


@pytest.mark.parametrize(
    ("device", "times", "valid"),
    [
        ("this", (1.0, 2.0), True),
        ("this", (0.5, 2.09), True),
        ("this", (1.0, 2.11), False),
        ("this", (1.06, 2.0), False),
        ("other", (9.0, 9.0), None),
    ],
)
def test_a_run_with_a_slow_peer_is_invalid(
    device: str, times: tuple[float, float], valid: bool | None
) -> None:
    run = run_of(device, *times)
    found = attention.against_recorded(run, RECORDED)
    assert found["valid"] is valid
    assert len(found["recorded"]) == (0 if valid is None else 2)
    verdict = "\n".join(attention._verdict(run | found))
    assert ("INVALID" in verdict) == (valid is False)


def test_every_recorded_case_is_one_that_is_run() -> None:
    recorded = json.loads(attention.RECORDED.read_text())
    assert set(recorded["train"]) == {shape.label for shape in train_cases.SHAPES}
    names = {*attention_peers.WITHOUT_DMS, *attention_peers.WITH_DMS}
    assert {name for rows in recorded["train"].values() for name in rows} <= names


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["attention", "--sections", "train,prefil"])
    assert exit_.value.code == 2
    assert "prefil: choose from train, prefill, decode" in capsys.readouterr().err


@pytest.mark.parametrize("name", attention_peers.WITH_DMS)
def test_peers_compute_the_same_function(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from torch.nn.attention import flex_attention as torch_flex

    monkeypatch.setattr(attention_peers, "_compiled_flex", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    inputs = make_inputs(Shape(2, 4, 2, 150, 16), 16, CPU, torch.float32)
    leaves = ("query", "key", "value", "logits")
    inputs = inputs._replace(**{leaf: getattr(inputs, leaf).detach() for leaf in leaves})
    found = attention_peers.WITH_DMS[name](inputs).forward().transpose(1, 2)
    theirs = train_cases.ours(inputs, "reference").forward()
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


def test_accuracy_of_the_cpu_backend(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cases", "40", "--device", "cpu", "--output", str(tmp_path)]
    assert main(["attention", "accuracy", *words]) == 0
    (file,) = tmp_path.glob("*/accuracy.json")
    record = json.loads(file.read_text())
    assert len(record["backends"]["blockwise"]) == 40
    assert set(record["worst"]["blockwise"]) == set(attention_accuracy.NAMES)
    assert "| blockwise | dlogits |" in capsys.readouterr().out


def test_the_cases_cover_their_ranges() -> None:
    cases = [attention_accuracy.draw_case(seed, 700) for seed in range(200)]
    shapes = [case.shape for case in cases]
    assert {s.d for s in shapes} >= {33, 64, 128, 256}
    assert {s.hq // s.hk for s in shapes} == {1, 3, 4, 7, 8}
    assert len({(s.d, case.dtype) for s, case in zip(shapes, cases, strict=True)}) == 18
    assert {case.dtype for case in cases} == {torch.bfloat16, torch.float16}
    assert any(s.s == 1 for s in shapes)
    assert any(case.window >= case.shape.s for case in cases)
    alpha = torch.sigmoid(attention_accuracy.case_inputs(cases[1], CPU).logits)
    for certain in (alpha == 0, alpha == 1, (alpha > 0) & (alpha < 1)):
        assert certain.float().mean() > 0.05


def _no_bias_gradient(*args: Any) -> Tensor:
    q, k, v, log_keep, *rest = args
    return blockwise.dms_attention(q, k, v, log_keep.detach() + 0 * log_keep.nan_to_num(), *rest)


def _window_off_by_one(*args: Any) -> Tensor:
    q, k, v, log_keep, window, scale = args
    return blockwise.dms_attention(q, k, v, log_keep, window + 1, scale)


def _rounded_scores(*args: Any) -> Tensor:
    q, k, v, log_keep, window, scale = args
    return blockwise.dms_attention(q, (k * 1.01).to(k.dtype), v, log_keep, window, scale)


@pytest.mark.parametrize("wrong", [_no_bias_gradient, _window_off_by_one, _rounded_scores])
def test_a_wrong_backend_is_not_within(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    assert attention_accuracy.measure(CPU, 10, ("blockwise",))["within"]
    monkeypatch.setattr(train_cases.dispatch, "train_attention", lambda name: wrong)
    assert not attention_accuracy.measure(CPU, 10, ("blockwise",))["within"]


def test_the_baseline_computes_the_same_function() -> None:
    for seed in range(6):
        case = attention_accuracy.draw_case(seed, 60)._replace(dtype=torch.float32)
        inputs = attention_accuracy.case_inputs(case, CPU)
        truth = attention_accuracy.exact(inputs)
        for a, b in zip(attention_accuracy.sdpa_baseline(inputs), truth, strict=True):
            assert a.shape == b.shape
            assert (a.double() - b).norm() <= 1e-4 * max(b.norm(), 1e-2 * truth[0].norm())
