"""Cases of the comparison: every policy without training at every ratio, and exports.

Windows and intervals are smaller than the defaults, which fit prompts of thousands of tokens. For
policies that evict only at the end of a prompt, the ratio is that of the prompt. For others it
covers prompt and generated text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dms_train.evaluation.errors import EvaluationError
from dms_train.hf.formats import read_spec, read_target_cr
from dms_train.inference.policies.registry import AUTO, policy_kind, policy_names

DENSE = "keep_all"
_LEFT_OUT = (AUTO, DENSE, "triattention")  # the last one needs a file for each model
_OF_PROMPTS: dict[str, Any] = {"budget_mode": "input"}
_WINDOW: dict[str, Any] = {"window": 8}
_INTERVAL: dict[str, Any] = {"interval": 16}
OPTIONS: dict[str, dict[str, Any]] = {
    "snapkv": _OF_PROMPTS | _WINDOW,
    "pyramidkv": _OF_PROMPTS | _WINDOW,
    "knorm": _OF_PROMPTS,
    "keydiff": _OF_PROMPTS,
    "r_kv": _WINDOW | _INTERVAL,
    "hard_kv": _WINDOW | _INTERVAL,
    "cam": {"targets": 8},
    "d2o": {"budget_mode": "total"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of a table.

    Attributes:
        method: Name of the policy.
        cr: Compression ratio of the policy, or of the export's training.
        model: Directory of an export; None for the dense model.
        options: Options of the policy except its ratio.
    """

    method: str
    cr: float
    model: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def engine(self, total: int) -> dict[str, Any]:
        """Return policy and options of `EngineOptions` for requests of `total` tokens."""
        if self.model is not None or self.method == DENSE:
            return {"policy": AUTO if self.model is not None else DENSE}
        own: dict[str, Any] = {"cr": self.cr}
        if self.method == "window":  # which holds the newest token besides
            own = {"window": max(1, int(total / self.cr) - 1)}
        return {"policy": self.method, "policy_options": own | self.options}


def cases(ratios: list[float], exports: list[Path]) -> list[Case]:
    """Return the dense model first, then every policy that needs no file, then exports.

    Args:
        ratios: Compression ratios.
        exports: Models that were trained for a method.

    Raises:
        EvaluationError: A model is dense.
    """
    all_cases = [Case(method=DENSE, cr=1)]
    for name in policy_names():
        if name not in _LEFT_OUT and not policy_kind(name).trained:
            own = OPTIONS.get(name, {})
            all_cases += [Case(method=name, cr=ratio, options=own) for ratio in ratios]
    for path in exports:
        spec = read_spec(path)
        if spec is None:
            raise EvaluationError(f"{path}: a dense model; give exports of a trained method")
        all_cases.append(Case(method=spec.kind, cr=read_target_cr(path), model=path))
    return all_cases
