"""Loss and gradients of one step of the engine against plain torch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dms_train.data.batches import Batch
from dms_train.families import LayerAttention
from dms_train.hf.architecture import Architecture
from dms_train.hf.rope import RopeScaling
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights, WeightSource
from dms_train.mcore.options import TRAINED_WEIGHTS, OptimOptions, ParallelOptions, Trainable
from dms_train.mcore.schedule.step import token_scale
from dms_train.method.dms.spec import DMSSpec
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from dms_train.method.token_losses import TOKEN_LOSSES, LossOptions
from tests.support import parity_runs, plain_objective, tiny

LENGTH, SEED = 40, 11
BAR = 1e-5  # of float32 beside float64, relative to the largest value
LINEAR_BAR = 1e-4
LLAMA3 = RopeScaling(factor=32.0)
# Loss positions of each sample; the microbatches of two hold 40, 5, 0 and 23 of them.
POSITIONS = (40, 0, 2, 3, 0, 0, 22, 1)

KL = ("kl_direction", "kl_temperature")
# family, changes of the method, changes of the plan and of the loss
Case = tuple[str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "cr1_step0": ("llama", {}, {"step": 0, "target_cr": 1.0}),
    "cr8_step0": ("llama", {}, {"step": 0, "target_cr": 8.0}),
    "cr8_step3": ("llama", {}, {"step": 3, "target_cr": 8.0}),
    "cr8_step100000": ("llama", {}, {"step": 100_000, "target_cr": 8.0}),
    # the first layer evicts more than its target already, and the second less
    "layer_targets": ("llama", {}, {"step": 3, "target_cr": 8.0, "layer_weights": (0.2, 1.1)}),
    "layer_targets_sum": (
        "qwen3",
        {"aux_form": "sum", "alpha_in_loss": "hard_st"},
        {"step": 4, "target_cr": 8.0, "layer_weights": (1.1, 0.3)},
    ),
    "reverse_kl": (
        "llama",
        {},
        {"step": 5, "target_cr": 1.0, "kl_direction": "student_teacher"},
    ),
    "warm_kl": ("llama", {}, {"step": 6, "target_cr": 1.0, "kl_temperature": 2.0}),
    "sum": ("llama", {"aux_form": "sum"}, {"step": 7, "target_cr": 8.0}),
    "immediate": ("llama", {"eviction": "immediate"}, {"step": 8, "target_cr": 8.0}),
    "nvidia": ("qwen3", {"preset": "dms_nvidia"}, {"step": 2, "target_cr": 8.0}),
    "fastdms": ("qwen2", {"preset": "dms_fastdms"}, {"step": 4, "target_cr": 8.0}),
    "no_rope": ("smollm3", {}, {"step": 3, "target_cr": 8.0}),
    "sandwich": ("gemma3_text", {}, {"step": 3, "target_cr": 8.0}),
    "partial_rope": ("glm4", {}, {"step": 3, "target_cr": 8.0}),
    "sinks_and_experts": ("gpt_oss", {}, {"step": 3, "target_cr": 8.0}),
    "linear": ("qwen3_5_text", {}, {"step": 3, "target_cr": 8.0}),
    "joint_norms": ("olmo3", {}, {"step": 3, "target_cr": 8.0}),
    "window": ("qwen3", {}, {"step": 3, "target_cr": 8.0}),
    "next_token": ("llama", {}, {"step": 9, "target_cr": 8.0, "loss": "lm"}),
    "zeroing": ("llama", {}, {"step": 1, "eviction": "none", "channel_scale": 0.25}),
}


def architecture(family: str) -> Architecture:
    """Two layers, and RoPE that its scaling changes within a few dozen tokens where it may."""
    changes: dict[str, dict[str, Any]] = {
        "llama": {"rope_scaling": LLAMA3, "rotary_base": 500_000.0},
        "gemma3_text": {
            "rope_scaling": RopeScaling(factor=4.0, rope_type="linear"),
            "query_scalar": 23,
        },
    }
    tiny_model = tiny.architecture(family, num_layers=2, kv_channels=16)
    return replace(tiny_model, **changes.get(family, {}))


def batches() -> list[Batch]:
    """Four microbatches of two samples with very unequal numbers of loss positions."""
    made = [tiny.batch(2 * number, length=LENGTH) for number in range(4)]
    for number, batch in enumerate(made):
        for row, count in enumerate(POSITIONS[2 * number : 2 * number + 2]):
            order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(number))
            batch.loss_mask[row] = (order < count).float()
    return made


def sources(a: Architecture, spec: DMSSpec) -> tuple[WeightSource, WeightSource]:
    """(student, teacher), with norms and biases that are not those of a start from scratch."""
    student = tiny.SmallEvictionChannels(a, 1, spec.channel, factor=0.002)
    return Uneven(student, 3), Uneven(RandomWeights(a, 2, 0.2), 4)


class Uneven(WeightSource):
    """A source whose vectors, norms and biases, are moved by a random amount."""

    def __init__(self, source: WeightSource, seed: int) -> None:
        self._source, self._seed = source, seed

    def get(self, name: str) -> torch.Tensor:
        tensor = self._source.get(name)
        if tensor.dim() == 1:
            generator = torch.Generator().manual_seed(self._seed + len(name))
            step = 0.001 if "q_proj" in name else 0.2
            tensor = tensor + step * torch.randn(tensor.shape, generator=generator)
        return tensor


class Step:
    """One engine with a teacher, and everything the plain computation needs."""

    def __init__(
        self, view: ParallelView, case: str, *, train: str = "all", **changes: Any
    ) -> None:
        family, constants, planned = CASES[case]
        constants = {"preset": "dms", "window": 4, "alpha_offset": 0.5, **constants}
        self.spec = PRESETS[constants.pop("preset")].override(**constants)
        self.architecture = architecture(family)
        if case == "window":  # longer than the method's, and not in the first layer
            base = self.architecture.rotary_base
            layers = (LayerAttention(rotary_base=base), LayerAttention(rotary_base=base, window=7))
            self.architecture = replace(self.architecture, layers=layers)
        whole = {"eviction": "soft", "channel_scale": 0.0, **planned, **changes}
        self.loss = LossOptions(**{key: whole.pop(key) for key in KL if key in whole})
        self.plan = StepPlan(**whole)
        student, self.teacher = sources(self.architecture, self.spec)
        options = TrainEngineOptions(
            parallel=ParallelOptions(),
            optim=OptimOptions(lr=1e-3),
            seed=SEED,
            loss=self.loss,
            trainable=Trainable(weights=train),
        )
        self.engine = McoreEngine(self.architecture, self.spec, view, options, student)
        self.engine.attach_teacher(self.teacher)
        self.student = dict(self.engine.hf_tensors())

    def exact(self, given: list[Batch]) -> plain_objective.Outcome:
        teacher = {name: self.teacher.get(name) for name in self.student}
        return plain_objective.outcome(
            *(self.architecture, self.spec, self.plan, self.student, teacher, given, SEED),
            loss=self.loss,
        )

    def found(self, given: list[Batch]) -> plain_objective.Outcome:
        totals = self.engine.forward_backward(self.plan, given)
        assert totals.samples == sum(len(batch.samples) for batch in given)
        means = (x / totals.samples for x in (totals.alpha, totals.live))
        reads = totals.reads / totals.samples * LENGTH
        gradients = self.engine.hf_gradients()
        return plain_objective.Outcome(totals.token_loss, totals.aux_loss, *means, reads, gradients)


def assert_same(found: plain_objective.Outcome, exact: plain_objective.Outcome) -> None:
    # its norm divides by outputs that may be near 0, which float32 rounds as much in a plain loop
    is_linear = any("linear_attn" in name for name in exact.gradients)
    for name in ("token_loss", "aux_loss", "alpha", "live", "reads"):
        expected = pytest.approx(getattr(exact, name), rel=BAR, abs=1e-9)
        assert getattr(found, name) == expected, name
    assert found.gradients.keys() == exact.gradients.keys()
    errors = {
        name: ((found.gradients[name] - g).abs().max() / g.abs().max().clamp(min=1e-9)).item()
        for name, g in exact.gradients.items()
    }
    print(f"\nworst gradient {max(errors.values()):.1e}")
    bar = LINEAR_BAR if is_linear else BAR
    assert not {name: error for name, error in errors.items() if error > bar}


@pytest.mark.parametrize("case", CASES)
def test_one_step_is_the_plain_objective(view: ParallelView, case: str) -> None:
    step = Step(view, case)
    given = batches()
    exact = step.exact(given)
    if step.plan.eviction == "soft":
        assert 0.2 < exact.alpha < 0.8
        assert (exact.aux_loss > 0.05) == (step.plan.target_cr == 8.0)
    assert_same(step.found(given), exact)
    assert_same(step.found(given[:1]), step.exact(given[:1]))


def test_a_mixed_loss_is_the_sum_of_its_terms_and_reports_each(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOKEN_LOSSES, "mixed", parity_runs.MIXED)
    given = batches()
    kl, next_token = Step(view, "cr8_step3"), Step(view, "cr8_step3", loss="lm")
    step = Step(view, "cr8_step3", loss="mixed")
    totals = step.engine.forward_backward(step.plan, given)
    gradients = step.engine.hf_gradients()
    parts = [kl.exact(given), next_token.exact(given)]
    assert tuple(totals.terms) == ("kl", "next_token")
    assert totals.terms["kl"] == pytest.approx(parts[0].token_loss, rel=BAR)
    assert totals.terms["next_token"] == pytest.approx(0.25 * parts[1].token_loss, rel=BAR)
    assert totals.loss == pytest.approx(sum(totals.terms.values()) + parts[0].aux_loss, rel=BAR)
    # both gradients hold that of the compression loss
    lm_alone = Step(view, "cr8_step3", loss="lm", target_cr=1.0).exact(given).gradients
    for name, gradient in parts[0].gradients.items():
        expected = gradient + 0.25 * lm_alone[name]
        assert (gradients[name] - expected).abs().max() < BAR * expected.abs().max(), name


def test_without_loss_positions_the_gradient_is_that_of_the_compression_loss(
    view: ParallelView,
) -> None:
    step = Step(view, "cr8_step3")
    given = [batch._replace(loss_mask=torch.zeros_like(batch.loss_mask)) for batch in batches()]
    exact = step.exact(given)
    assert exact.token_loss == 0
    assert exact.aux_loss > 0.05
    assert_same(step.found(given), exact)


@pytest.mark.parametrize("case", ["cr1_step0", "nvidia", "fastdms"])
def test_an_untouched_student_does_not_differ_from_a_teacher_of_its_weights(
    view: ParallelView, case: str
) -> None:
    """Both run the same model: the same RoPE, norms and biases."""
    step = Step(view, case, eviction="none", channel_scale=1.0, target_cr=1.0)
    step.engine.load_hf(step.teacher)
    totals = step.engine.forward_backward(step.plan, batches())
    assert totals.token_loss == pytest.approx(0.0, abs=1e-12)
    assert totals.aux_loss == 0.0


def test_each_step_and_sample_draws_its_own_noise(view: ParallelView) -> None:
    """The mean relaxed decision of one sample, which nothing but the noise changes."""
    step = Step(view, "cr8_step0")
    alpha = {}
    for number in (0, 1, 100_000):
        step.plan = replace(step.plan, step=number)
        for sample in (0, 1):
            batch = tiny.batch(0, 1, LENGTH)._replace(samples=torch.tensor([sample]))
            alpha[number, sample] = step.engine.forward_backward(step.plan, [batch]).alpha
    assert len({round(value, 6) for value in alpha.values()}) == len(alpha)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_scale_is_microbatches_over_loss_positions(view: ParallelView, count: int) -> None:
    given = batches()[:count]
    positions = sum(POSITIONS[: 2 * count])
    assert token_scale(given, view).item() == pytest.approx(count / positions)


@pytest.mark.parametrize("train", TRAINED_WEIGHTS)
def test_only_layers_without_a_window_decide(view: ParallelView, train: str) -> None:
    """Recordings, retention and the eviction channel of a model with one such layer of two."""
    step = Step(view, "window", train=train)
    recording = step.engine.record(
        StepPlan(eviction="hard", channel_scale=0.0), torch.arange(LENGTH)
    )
    assert recording is not None
    assert recording.decision_logits.shape == (1, 4, LENGTH)
    found = step.engine.evaluate(StepPlan(eviction="all", channel_scale=0.0), batches())
    assert len(found.kept) == 1
    before = dict(step.engine.hf_tensors())
    step.engine.reset_eviction_channel()
    changed = {n for n, w in step.engine.hf_tensors() if not torch.equal(w, before[n])}
    assert changed == {"model.layers.0.self_attn.q_proj.weight"}
