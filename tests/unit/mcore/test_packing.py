"""Packed documents through the engine, against every document alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dms_train.data.batches import Batch
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers.attention import MethodSelfAttention
from dms_train.method.plan import StepPlan
from tests.support import plain_objective, tiny
from tests.unit.mcore.test_one_step import LENGTH, SEED, Step, assert_same

# Documents of the samples; the first sample has no padding, others end in some. Shorter and longer
# than the window of 4, and a sample that is one document.
LENGTHS = [[[17, 1, 9, 13], [3, 25, 6]], [[40], [2, 2, 30]]]


def packs() -> list[Batch]:
    return [
        tiny.packed(tiny.batch(2 * number, length=LENGTH), lengths)
        for number, lengths in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize(
    "case",
    ["cr8_step3", "sum", "immediate", "nvidia", "fastdms", "next_token", "zeroing", "linear"],
)
def test_a_packed_step_is_the_plain_objective_of_documents_alone(
    view: ParallelView, case: str
) -> None:
    step = Step(view, case)
    teacher = {name: step.teacher.get(name) for name in step.student}
    exact = plain_objective.packed_outcome(
        step.architecture,
        step.spec,
        step.plan,
        step.student,
        teacher,
        packs(),
        [own for lengths in LENGTHS for own in lengths],
        SEED,
    )
    if step.plan.eviction == "soft":
        assert 0.2 < exact.alpha < 0.8
        assert exact.aux_loss > 0.05
    assert_same(step.found(packs()), exact)


@pytest.mark.parametrize("case", ["cr1_step0", "immediate"])
def test_a_packed_step_is_that_of_documents_that_the_engine_runs_alone(
    view: ParallelView, case: str
) -> None:
    """Without noise, which a document at another position draws anew."""
    step = Step(view, case, noise=False, target_cr=1.0)
    loss, gradients, counted = 0.0, {n: torch.zeros_like(w) for n, w in step.student.items()}, 0.0
    for batch, lengths in zip(packs(), LENGTHS, strict=True):
        for row, own in enumerate(lengths):
            for part in torch.arange(sum(own)).split(own):
                alone = Batch(*(x[row : row + 1, part] for x in batch[:3]), batch.samples[:1])
                count = alone.loss_mask.sum().item()
                loss += count * step.engine.forward_backward(step.plan, [alone]).token_loss
                for name, gradient in step.engine.hf_gradients().items():
                    gradients[name] += count * gradient
                counted += count
    packed = step.engine.forward_backward(step.plan, packs())
    assert packed.token_loss == pytest.approx(loss / counted, rel=1e-5)
    for name, gradient in step.engine.hf_gradients().items():
        expected = gradients[name] / counted
        assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_padding_and_other_documents_change_nothing(view: ParallelView) -> None:
    """Other tokens in the padding change no gradient; in a document only what is its own."""
    step = Step(view, "cr8_step3")
    (batch, _), lengths = packs(), LENGTHS[0]
    before = step.found([batch])
    tokens = batch.tokens.clone()
    tokens[1, sum(lengths[1]) :] = 7
    assert not torch.equal(tokens, batch.tokens)
    after = step.found([batch._replace(tokens=tokens)])
    assert after[:5] == before[:5]
    for name, gradient in before.gradients.items():
        assert torch.equal(gradient, after.gradients[name]), name


@pytest.mark.parametrize("case", ["cr8_step3", "nvidia"])
def test_one_document_for_each_sample_is_the_unpacked_step(view: ParallelView, case: str) -> None:
    step = Step(view, case)
    batch = tiny.batch(0, length=LENGTH)
    found = step.found([tiny.packed(batch, [[LENGTH], [LENGTH]])])
    assert_same(found, step.found([batch]))


def test_an_evaluation_counts_slots_of_documents(view: ParallelView) -> None:
    """cr_factor: tokens over slots at the last token of each document, padding left out."""
    step = Step(view, "cr1_step0", eviction="hard")
    a, channel = step.architecture, step.spec.channel
    step.engine.load_hf(tiny.SmallEvictionChannels(a, 1, channel, factor=0.02))  # evicts more
    found = step.engine.evaluate(step.plan, packs())
    held = seen = 0.0
    for batch, lengths in zip(packs(), LENGTHS, strict=True):
        for row, own in enumerate(lengths):
            for part in torch.arange(sum(own)).split(own):
                alone = Batch(*(x[row : row + 1, part] for x in batch[:3]), batch.samples[:1])
                result = step.engine.evaluate(step.plan, [alone])
                held += len(part) / result.cr_factor
                seen += len(part)
    assert 1.2 < found.cr_factor == pytest.approx(seen / held)
    layers = torch.tensor(found.kept)
    assert layers.mean().item() == pytest.approx(held / seen)


def test_bf16_weights_run_nearly_the_same_step(build: Callable[..., McoreEngine]) -> None:
    """The wrapper that turns inputs into bf16 leaves the documents as they are."""
    plan = StepPlan(eviction="soft", channel_scale=0.0, target_cr=4.0, loss="lm", noise=False)
    found = []
    for dtype in ("fp32", "bf16"):
        totals = build("llama", "dms", dtype, alpha_offset=0.5).forward_backward(plan, packs())
        found.append((totals.token_loss, totals.live, totals.positions))
    (loss, live, positions), (rounded_loss, rounded_live, same) = found
    assert rounded_loss == pytest.approx(loss, rel=3e-2)
    assert rounded_live == pytest.approx(live, rel=0.1)
    assert positions == same == sum(sum(own) for pair in LENGTHS for own in pair)


def test_without_packing_no_layer_sees_documents(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unpacked pass hands the kernels no bounds, so it takes the code it always took."""
    step, seen = Step(view, "cr8_step3"), []
    attend = MethodSelfAttention.forward

    def forward(self, *args, **kwargs):
        seen.append(self.documents)
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(MethodSelfAttention, "forward", forward)
    step.engine.forward_backward(step.plan, [tiny.batch(0, length=LENGTH)])
    assert seen == [None] * 4  # two layers of student and teacher
    step.engine.forward_backward(step.plan, packs()[:1])
    assert None not in seen[4:]
