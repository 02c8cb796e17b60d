"""Verification that an exported model computes what the trained model computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.hf.formats import read_spec
from dms_train.hf.json_files import read_config
from dms_train.hf.selftest import SelfTest
from dms_train.hf.typed import typed
from dms_train.hf.weight_reader import WeightReader
from dms_train.method.losses import kl_teacher_student

_GENERATED = 16  # tokens of the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Distance of a loaded export from its reference.

    Attributes:
        tokens: Length T of the reference sequence.
        decisions: Number of decisions compared, layers * KV heads * T.
        decision_difference: Largest absolute decision-logit difference of one token.
        head_drift: Mean absolute decision-logit difference of the worst KV head. A misplaced row
            moves all decisions of a head; rounding in bfloat16 moves single ones.
        decisions_flipped: Hard decisions that differ.
        logit_difference: Largest absolute logit difference.
        kl_per_token: Mean KL(reference || export) in nats.
        top1_agreement: Share of positions with the same most likely token.
        generated_kl_per_token: Mean KL(one pass without a cache || transformers' `generate` with
            the cache of the export) in nats, of the last tokens of the reference.
        decision_tolerance: Largest `head_drift` that passes.
        kl_tolerance: Largest `kl_per_token` and `generated_kl_per_token` that pass.
    """

    tokens: int
    decisions: int
    decision_difference: float
    head_drift: float
    decisions_flipped: int
    logit_difference: float
    kl_per_token: float
    top1_agreement: float
    generated_kl_per_token: float
    decision_tolerance: float
    kl_tolerance: float

    @property
    def replayed(self) -> bool:
        """True if one pass computes the reference; not-a-number fails."""
        settled = self.head_drift <= self.decision_tolerance
        return settled and self.kl_per_token <= self.kl_tolerance

    @property
    def passed(self) -> bool:
        """True if `generate` computes it as well; not-a-number fails."""
        return self.replayed and self.generated_kl_per_token <= self.kl_tolerance


def compare(
    reference: SelfTest, decision_logits: Tensor, logits: Tensor, generated: Tensor
) -> Report:
    """Compare what an export computed with its reference.

    Args:
        reference: The shipped self-test.
        decision_logits: [layers, kv_heads, T].
        logits: [T, vocab].
        generated: Logits of the last positions but one, from `generate` [n, vocab].

    Raises:
        ValueError: If the shapes are not those of the reference.
    """
    ours = (decision_logits.shape, logits.shape)
    if ours != (reference.decision_logits.shape, reference.logits.shape):
        raise ValueError(
            f"the export's decisions {tuple(ours[0])} and logits {tuple(ours[1])} do not have the "
            "shapes of its self-test; it belongs to another model"
        )
    theirs, computed = reference.logits.double(), logits.double()
    expected, decided = reference.decision_logits.double(), decision_logits.double()
    difference = (decided - expected).abs()
    one_pass = computed[-1 - len(generated) : -1]  # each predicts the next token
    return Report(
        tokens=logits.shape[0],
        decisions=decided.numel(),
        decision_difference=difference.max().item(),
        head_drift=difference.mean(-1).max().item(),
        decisions_flipped=int(((decided > 0) != (expected > 0)).sum()),
        logit_difference=(computed - theirs).abs().max().item(),
        kl_per_token=kl_teacher_student(computed, theirs).mean().item(),
        top1_agreement=(computed.argmax(-1) == theirs.argmax(-1)).double().mean().item(),
        generated_kl_per_token=kl_teacher_student(generated.double(), one_pass).mean().item(),
        decision_tolerance=reference.decision_tolerance,
        kl_tolerance=reference.kl_tolerance,
    )


@typed
def verify(directory: str | Path, *, dtype: str = "float32", device: str = "cpu") -> Report:
    """Load an export with its own code and replay its self-test.

    The end of the text is computed a second time, as users do: by transformers' `generate`, which
    is given its tokens one by one. A version of transformers that hands the cache over in another
    way than the code of the export expects changes what it generates, and nothing else.

    Args:
        directory: The export.
        dtype: Compute dtype. In bfloat16 the rounding of the export adds to that of the reference,
            and large models then exceed the tolerances.
        device: Device to run on.

    Raises:
        FileNotFoundError: If the directory, its weights or its self-test are absent.
        ValueError: If it is not a retrofitted export or a file is damaged.
    """
    from transformers import AutoModelForCausalLM

    directory = Path(directory)
    spec = read_spec(directory)
    if spec is None:
        raise ValueError(f"{directory}: a dense model; there are no decisions to verify")
    if "auto_map" not in read_config(directory):
        raise ValueError(
            f"{directory}: has no code for transformers that could be verified; run it with "
            "dms-generate"
        )
    reference = SelfTest.load(directory)
    if len(reference.input_ids) < 3:  # for one step of `generate` after its prompt
        raise ValueError(f"{directory}: its self-test is too short; export the model again")
    WeightReader(directory)  # refuses damaged shards with a one-line error
    model = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, local_files_only=True, dtype=dtype
    )
    model = model.to(device).eval()
    input_ids = reference.input_ids[None].to(device)
    with torch.no_grad():
        logits = model(input_ids, use_cache=False).logits[0].cpu()
    decided = getattr(model, f"{spec.kind}_decision_logits")(input_ids)
    return compare(reference, decided[:, 0].cpu(), logits, _generated(model, input_ids).cpu())


def _generated(model: Any, input_ids: Tensor) -> Tensor:
    """Return the logits [n, vocab] with which `generate` would choose the last n tokens."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # in place of what the directory states
    count = min(_GENERATED, input_ids.shape[1] - 1)
    prompt = input_ids[:, :-count]

    def force_next_token(tokens: Tensor, scores: Tensor) -> Tensor:
        given = input_ids[:, tokens.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter(1, given, 0.0)

    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        logits_processor=[force_next_token],
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(output.logits)
