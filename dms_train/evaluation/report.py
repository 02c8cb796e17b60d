"""A validation as files: `metrics.json`, `report.md` and two pictures."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dms_train.evaluation.measure import Agreement, Cost
from dms_train.evaluation.plots import draw_training, read_rows
from dms_train.evaluation.run_report import early_stop_sentence
from dms_train.evaluation.validation import ValidationResult
from dms_train.inference.errors import InferenceError
from dms_train.inference.heatmap import draw_heatmap
from dms_train.method.base import MethodSpec
from dms_train.tables import markdown_table

METRICS, REPORT = "metrics.json", "report.md"
TRAINING, RETENTION = "training.png", "retention.png"
NO_PLOTS = "no plots: matplotlib is not installed; pip install 'dms-train[eval]' draws them"
_NAMES = {
    "teacher": "original",
    "window_only": "original, window only",
    "dense": "original, dense cache",
}
_WORDS = {
    "generation": "while solving the problems",
    "text": "at the end of the validation sequences",
}


def tables(result: ValidationResult) -> str:
    """Return the result as Markdown tables."""
    sections, spec = [], result.target.spec
    names = {**_NAMES, "student": spec.label}
    if result.agreement is not None:
        sections.append(_agreement_table(result.agreement, spec))
    if result.accuracies:
        rows = [[names[n], str(a.share)] for n, a in result.accuracies.items()]
        sections.append(markdown_table(["model", "accuracy"], rows))
    for name, costs in result.costs.items():
        sections.append(f"Cache {_WORDS[name]}:\n\n{_cost_table(costs, names)}")
    selftest = result.selftest
    verdict = "passed" if selftest.passed else "FAILED"
    sections.append(
        f"Self-test through the compact cache: {verdict}, KL {selftest.kl:.2e} nats/token "
        f"(limit {selftest.limit:g})."
    )
    return "\n\n".join(sections)


def _agreement_table(agreement: Agreement, spec: MethodSpec) -> str:
    counted = "tokens past the window" if spec.window else "all tokens but the first"
    share = agreement.evicted_share(agreement.student, spec.window)
    rows = [
        [f"KL(original, {spec.label}), nats/token", str(agreement.kl)],
        ["same most likely token", str(agreement.top1)],
        ["next-token loss of the original, nats", str(agreement.teacher_loss)],
        [f"next-token loss of {spec.label}, nats", str(agreement.student_loss)],
        [f"{spec.verb}, of {counted}", f"{share:.3f}"],
    ]
    if agreement.window_only is not None:
        rows += [
            ["KL(original, window only), nats/token", str(agreement.window_only.kl)],
            ["next-token loss of window only, nats", str(agreement.window_only.loss)],
        ]
    return markdown_table(["agreement", "value"], rows)


def _cost_table(costs: dict[str, Cost], names: dict[str, str]) -> str:
    header = ["model", "cr_factor", "KV reads", "peak tokens", "cache bytes of one sequence"]
    rows = [
        [
            names[name],
            f"{cost.cr_factor:.2f}",
            f"{cost.kv_reads:,.0f}",
            f"{cost.peak_tokens:,.1f}",
            f"{cost.cache_bytes:,}",
        ]
        for name, cost in costs.items()
    ]
    return markdown_table(header, rows)


def write(result: ValidationResult, folder: Path, rows: Path | None) -> list[str]:
    """Write metrics, report and pictures.

    Args:
        result: Result to write.
        folder: Output folder; created if absent.
        rows: `metrics.jsonl` of the run that trained the export; None if unknown.

    Returns:
        Lines for the user about what could not be done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures, advice = _draw(result, folder, rows), []
    if pictures is None:
        pictures, advice = [], [NO_PLOTS]
    stop = early_stop_sentence(read_rows(rows)) if rows is not None and rows.is_file() else ""
    (folder / REPORT).write_text(_report(result, pictures, stop), encoding="utf-8")
    numbers = json.dumps(result.numbers(), indent=2)
    (folder / METRICS).write_text(numbers + "\n", encoding="utf-8")
    return advice


def _draw(result: ValidationResult, folder: Path, rows: Path | None) -> list[str] | None:
    """Draw the pictures and return their names; None without matplotlib."""
    cost = _main_cost(result)
    kept, path = 1 / cost.cr_factors, folder / RETENTION
    try:
        draw_heatmap(kept, path, "tokens kept", "share", (0.0, 1.0), cost.layers)
    except InferenceError:
        return None
    if rows is not None and rows.is_file() and draw_training(rows, folder / TRAINING):
        return [TRAINING, RETENTION]
    return [RETENTION]


def _main_cost(result: ValidationResult) -> Cost:
    """Return the cost of the export in its main measurement."""
    return next(iter(result.costs.values()))["student"]


def _report(result: ValidationResult, pictures: list[str], early_stop: str) -> str:
    cost = _main_cost(result)
    rows = zip(cost.layers, cost.cr_factors.tolist(), strict=True)
    eviction_channels = markdown_table(
        ["layer", *(f"KV head {head}" for head in range(cost.cr_factors.shape[1]))],
        [[str(layer), *(f"{factor:.2f}" for factor in row)] for layer, row in rows],
    )
    sections = ["# Validation", _measured(result)]
    sections += [early_stop] if early_stop else []
    sections += [tables(result), _meaning(result)]
    sections.append(f"cr_factor by layer and KV head:\n\n{eviction_channels}")
    sections += [f"![{Path(name).stem}]({name})" for name in pictures]
    return "\n\n".join(sections) + "\n"


def _measured(result: ValidationResult) -> str:
    target, on = result.target, []
    window = f" with a window of {target.window}" if target.window else ""
    if result.agreement is not None:
        lengths = result.agreement.lengths
        sizes = " to ".join(str(size) for size in sorted({min(lengths), max(lengths)}))
        on.append(f"{len(lengths)} validation sequences of {sizes} tokens")
    if result.accuracies:
        on.append(
            f"{result.num_problems} problems on {result.num_sheets} sheets, answered greedily"
        )
    versions = ", ".join(f"{name} {_version(name)}" for name in ("dms-train", "torch"))
    return "\n".join(
        [
            f"- export: `{target.export}`, {target.spec.label}{window}",
            f"- original: `{target.teacher}`",
            f"- measured on: {'; '.join(on)}",
            f"- device: {_device(target.device)}; {versions}, Python {platform.python_version()}",
            f"- took {result.seconds:.0f} s",
        ]
    )


def _device(device: str) -> str:
    if device.startswith("cuda"):
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"{device}, {torch.get_num_threads()} thread(s)"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the program runs from a source tree
        return "not installed"


def _meaning(result: ValidationResult) -> str:
    lines = [
        "In brackets: 95% bootstrap interval over sequences or sheets.",
        "",
        "- cr_factor: tokens seen over cache slots held at the last token, in the layers of the "
        "table below.",
        "- KV reads: slots attended by one sequence, mean over KV heads; summed over the decoding "
        "steps of an answer, or over all tokens of a validation sequence.",
        "- peak tokens: most tokens a sequence held at a time, mean over KV heads and sequences.",
        "- cache bytes of one sequence: most bytes of the cache slots that a sequence reserved.",
    ]
    if result.agreement is not None:
        lines.append(
            "- KL and next-token loss: both models read the same text through their caches, "
            f"{result.target.spec.verb} tokens gone."
        )
    if result.accuracies:
        lines.append("- accuracy: problems whose answer is exactly the expected one.")
    if "window_only" in result.accuracies:
        lines.append(
            "- window only: the original's weights, every token evicted when it leaves the window."
        )
    lines.append("- tokens kept: 1 / cr_factor of each layer and KV head.")
    return "\n".join(lines)
