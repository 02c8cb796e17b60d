"""The benchmark of the training step: what it counts, and that its parts run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.tables import table
from benchmarks.train_step import kernel_times, peer
from benchmarks.train_step import main as train_step
from benchmarks.train_step import page as train_step_page
from benchmarks.train_step import tables as train_step_tables
from benchmarks.train_step.case import parallel_options
from benchmarks.train_step.shapes import Case, Layout, parse_layout


def case(**changes: object) -> Case:
    values: dict[str, object] = {"shape": "qwen2.5-1.5b", "subject": "ours", "kind": "distill"}
    return Case(**{**values, **changes})


@pytest.mark.parametrize(
    ("kind", "step_s", "tflops"), [("lm", 0.280, 333), ("distill", 0.382, 325)]
)
def test_model_flops_are_counted_as_in_the_recorded_baselines(
    kind: str, step_s: float, tflops: float
) -> None:
    counted = case(kind=kind).model_flops / step_s / 1e12
    assert counted == pytest.approx(tflops, rel=0.01)


def test_figures_are_of_one_gpu() -> None:
    one, two = case(), case(layout=Layout(dp=2))
    assert two.tokens == 2 * one.tokens
    measured = {"step_s": 0.5}
    assert train_step.figures(two, measured) == train_step.figures(one, measured)


@pytest.mark.parametrize("text", ["dp1", "tp2_sp", "pp2_vp2_dp2", "pp2_last1_sp", "tp2_sp_overlap"])
def test_layouts_are_named_by_their_words(text: str) -> None:
    layout = parse_layout(text)
    assert layout.label == text
    assert Case.from_dict(case(layout=layout).to_dict()).layout == layout


def test_a_case_sets_layers_and_fp8_and_names_them() -> None:
    chosen = case(layers="transformer_engine", fp8=True)
    assert chosen.label == "ours (transformer_engine, FP8): teacher + KL"
    assert Case.from_dict(chosen.to_dict()) == chosen
    options = parallel_options(chosen, torch.device("cuda"))
    assert (options.layers, options.fp8) == ("transformer_engine", True)


def test_an_unknown_word_of_a_layout_is_named() -> None:
    with pytest.raises(ValueError, match="layout tp2_xp3: 'xp3'"):
        parse_layout("tp2_xp3")


def test_busy_time_counts_overlapping_kernels_once() -> None:
    spans = [(0.0, 4.0, "a"), (1.0, 2.0, "b"), (5000.0, 5003.0, "c")]
    busy, waits = kernel_times._covered(spans)
    assert busy == 7.0
    assert waits == [{"ms": 4.996, "after": "a", "before": "c"}]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("attend_backward", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("gate_backward", "activation"),
        ("rms_norm_backward", "norm"),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add",
            "elementwise",
        ),
    ],
)
def test_kernels_are_sorted_by_name(kernel: str, kind: str) -> None:
    assert kernel_times.kind_of(kernel) == kind


def test_ratios_compare_the_same_setting_only() -> None:
    def row(kind: str, step_s: float, **changes: object) -> dict[str, object]:
        return {"case": case(kind=kind, **changes).to_dict(), "step_s": step_s}

    rows = [
        row("lm", 0.2),
        row("distill", 0.25),
        row("dms", 0.27),
        row("dms", 0.9, layout=Layout(dp=2)),
        row("distill", 0.1, subject="peer"),
    ]
    assert list(train_step_tables.ratio_lines(rows)) == [
        "qwen2.5-1.5b dp1 (auto): dms / distill = 1.080",
        "qwen2.5-1.5b dp1 (auto): distill / lm = 1.250",
    ]


def test_copies_are_compared_with_one_gpu_of_the_same_setting() -> None:
    def row(speed: float, **changes: object) -> dict[str, object]:
        return {"case": case(kind="dms", **changes).to_dict(), "tokens_per_s_gpu": speed}

    two = Layout(dp=2)
    rows = [row(100.0), row(400.0, trains="lora"), row(150.0, fp8=True)]
    rows += [row(160.0, layers="transformer_engine"), row(90.0, layout=two)]
    rows.append(row(80.0, layout=two, cuda_graph="never"))
    assert list(train_step_page.scaling_lines(rows)) == [
        "qwen2.5-1.5b dms: DP 2 reaches 0.900 of one GPU's fastest on each",
        "qwen2.5-1.5b dms: DP 2, eager reaches 0.800 of one GPU's fastest on each",
    ]


def test_a_setting_is_what_is_measured_and_not_for_how_long() -> None:
    assert case(steps=3, profile=True).setting == case(steps=9).setting
    assert case(layers="local").setting != case(layers="transformer_engine").setting


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({"kind": "lm", "layout": Layout(tp=2)}, True),
        ({"kind": "lm", "layout": Layout(tp=2, sp=True)}, False),
        ({"kind": "lm", "layout": Layout(tp=2, sp=True), "layers": "transformer_engine"}, True),
        ({"kind": "distill", "layout": Layout(tp=2)}, False),
        ({"kind": "lm", "layout": Layout(pp=2)}, False),
        ({"kind": "dms"}, False),
        ({"kind": "dmc"}, False),
    ],
)
def test_cases_that_the_peer_supports(changes: dict[str, object], supported: bool) -> None:
    peer = {"layers": "local"} | changes
    assert case(subject="peer", **peer).known == supported
    assert case(**peer).known


def test_cases_name_whether_passes_are_replayed() -> None:
    eager, replayed = case(kind="dms", cuda_graph="never"), case(kind="dms")
    assert eager.setting != replayed.setting
    assert "eager" in eager.label
    assert "eager" not in replayed.label
    assert parallel_options(eager, torch.device("cpu")).cuda_graph == "never"


def test_what_the_peer_cannot_do_is_refused_before_anything_runs(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["train_step", "--cases", "peer:lm,peer:dms"])
    assert "teacher + KL + DMS in layout dp1: not supported" in capsys.readouterr().err


def test_the_page_names_the_command_that_measured_a_row() -> None:
    measured = {
        "label": "",
        "step_s": 0.2,
        "low_s": 0.2,
        "high_s": 0.2,
        "tokens_per_s_gpu": 1.0,
        "model_tflops_gpu": 1.0,
        "max_memory_allocated": 1,
        "versions": {},
        "date": "2026-02-02",
        "commit": "abcdef1234",
    }
    later = measured | {"case": case(kind="lm").to_dict(), "run": "2026-02-02"}
    first = measured | {"case": case(subject="peer").to_dict(), "run": "2026-01-01"}
    page = list(train_step_page.page_lines({"device": "some", "rows": [first, later]}))
    table = [line for line in page if line.startswith("| qwen2.5-1.5b")]
    assert [line.split("|")[3].strip() for line in table] == [
        "ours (auto): LM loss",
        "megatron-core (auto): teacher + KL",
    ]
    assert [line.split("|")[-2].strip() for line in table] == ["2", "1"]
    (runs,) = [line for line in page if line.startswith("1 began")]
    at = "(abcdef1, 2026-02-02)"
    assert runs == f"1 began 2026-01-01 {at}, 2 began 2026-02-02 {at}.\n"


def test_the_peer_gets_a_fused_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Transformer Engine its AdamW is torch's, which has a fused step as ours has."""
    model, optimizer, fused = torch.nn.Linear(1, 1), object(), []
    replaced = {"_config": SimpleNamespace(bf16=False), "_model": model, "OptimizerConfig": None}
    replaced |= {"get_megatron_optimizer": optimizer, "DistributedDataParallel": model}
    for name, value in replaced.items():
        monkeypatch.setattr(peer, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(peer.optim, "mixed_precision", lambda _, models: models)
    monkeypatch.setattr(peer.fusions, "fuse_adam", fused.append)
    view = SimpleNamespace(device=torch.device("cpu"))
    peer.step_of_peer(case(subject="peer", kind="lm"), view, None, [])
    assert fused == [optimizer]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("subject", "kind", "layout"),
    [("ours", "dms", "tp2_sp"), ("ours", "dmc", "dp1"), ("peer", "distill", "dp1")],
)
def test_a_tiny_case_is_measured(subject: str, kind: str, layout: str) -> None:
    tiny = case(
        shape="tiny",
        subject=subject,
        kind=kind,
        layout=parse_layout(layout),
        layers="local",
        warmup=1,
        steps=2,
        profile=True,
    )
    row = train_step.run_case(tiny)
    assert "failed" not in row, row["failed"]
    assert row["last_loss"] != row["first_loss"]
    assert row["profile"]["kernels"]
    head, _, line = table(train_step_tables.COLUMNS, [row]).splitlines()
    assert line.count("|") == head.count("|")
