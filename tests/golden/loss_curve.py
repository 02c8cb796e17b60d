"""The golden loss curve: every metric of a tiny `dms-train` run on a CPU, recorded.

The run zeroes the eviction channel, anneals the ratio with distillation, holds it, exports, and
evaluates the export. Its model has Llama 3's RoPE scaling, its stages different learning rates, its
batches several microbatches with unequal loss masks, so that most mistakes in a step move a value.

    python -m tests.golden.loss_curve            print what differs from the record
    python -m tests.golden.loss_curve --write    print it and store the new values
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dms_train.data_prep.prepare import main as dms_data
from dms_train.export.writer import write_export
from dms_train.hf.architecture import Architecture
from dms_train.hf.rope import RopeScaling
from dms_train.hf.tensors import expected_shapes
from tests.support import launch

RECORD = Path(__file__).with_name("loss_curve.json")
# One thread, and no vector code that ATen, MKL, oneDNN or the C library choose by processor. With
# these, a model of processor gives the same bits every time; another may still round differently.
SAME_BITS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX2_Usable,-FMA,-FMA_Usable,-FMA4_Usable",
    "CUDA_VISIBLE_DEVICES": "",
}
# Names of the record, which say what is measured, and the keys of metrics.jsonl that hold it.
STEP = {
    "loss": "train/loss",
    "distillation_loss": "train/kl",
    "compression_loss": "train/aux_loss",
    "mean_decision": "train/alpha",
    "target_ratio": "train/target_cr",
    "ratio": "train/cr",
    "neuron_scale": "train/channel_scale",
    "gradient_norm": "train/grad_norm",
    "learning_rate": "train/lr",
}
EVALUATION = {
    "loss": "eval/loss",
    "distillation_loss": "eval/kl",
    "compression_loss": "eval/aux_loss",
    "mean_decision": "eval/alpha",
    "target_ratio": "eval/target_cr",
    "ratio": "eval/cr",
    "neuron_scale": "eval/channel_scale",
    "cache_reads": "eval/kv_reads",
    "kept_shares": "eval/kept",
}
EXPORT_EVALUATION_PREFIX = "validate_export/"
EXPORT_EVALUATION = {
    "distillation_loss": "kl_nats_per_token",
    "top_1_agreement": "top1_agreement",
    "language_model_loss": "lm_nats_per_token.student",
    "teacher_language_model_loss": "lm_nats_per_token.teacher",
    "ratio": "cr_factor",
    "cache_reads": "kv_reads.student",
    "peak_tokens": "peak_tokens.student",
}

Curve = dict[str, list[dict[str, Any]]]


def write_model(path: Path, tokenizer: Path) -> None:
    """A two-layer Llama; its weights are multiples of 2^-13, so that nothing rounds."""
    architecture = Architecture(
        family="llama",
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        vocab_size=50,
        max_position_embeddings=256,
        rotary_base=10000.0,
        layernorm_epsilon=1e-6,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(factor=8.0),
    )
    write_export(
        path,
        architecture=architecture,
        spec=None,
        cr_factor=None,
        target_cr=1.0,
        dtype=torch.float32,
        export_format="dms",
        weights=_weights(architecture),
        source_dir=tokenizer,
        selftest=None,
        provenance={},
    )


def _weights(architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    draws = np.random.RandomState(0)  # its streams never change
    for name, shape in expected_shapes(architecture).items():
        values = draws.randint(-2048, 2048, shape) / 2.0**13
        if name.endswith("norm.weight"):
            values = values + 1.0
        yield name, torch.tensor(values, dtype=torch.float32)


def _overrides(folder: Path) -> list[str]:
    return [
        f"model.path={folder / 'model'}",
        f"data.paths=[{folder / 'data' / 'train'}]",
        "data.split='90,10,0'",
        "data.seq_length=48",
        "data.micro_batch_size=1",
        "data.global_batch_size=3",
        "data.eod_mask_loss=true",
        "method.channel=0",
        "method.window=4",
        "stage.run=[zero_neuron,retrofit,hold,export,validate_export]",
        "stage.zero_neuron.steps=6",
        "stage.retrofit.target_cr=3",
        "stage.retrofit.steps_per_cr=6",
        "stage.retrofit.lr=2e-3",
        "stage.hold.steps=6",
        "stage.export.every_integer_cr=false",
        "stage.validate_export.samples=4",
        "optim.lr=1e-3",
        "optim.weight_decay=0.1",
        "optim.clip_grad=0.3",
        "optim.lr_warmup_steps=2",
        f"run.dir={folder / 'run'}",
        "run.save_interval=0",
        "run.check_teacher=false",  # random weights
        "run.eval_interval=4",
        "run.eval_samples=4",
        "observe=quiet",
        "observe.progress=false",
    ]


def measure(folder: Path) -> Curve:
    """Run `dms-train` in an empty folder; its curve."""
    dms_data(["exam-sheets", "--out", str(folder / "data"), "--sheets", "40"])
    write_model(folder / "model", folder / "data" / "tokenizer")
    launch.checked(launch.python("-m", "dms_train", *_overrides(folder), timeout=300, **SAME_BITS))
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return read_curve([json.loads(line) for line in lines])


def read_curve(rows: Sequence[dict[str, Any]]) -> Curve:
    """The recorded names and values of a run's metrics."""
    exported = {k: EXPORT_EVALUATION_PREFIX + v for k, v in EXPORT_EVALUATION.items()}
    parts = {"steps": STEP, "evaluations": EVALUATION, "export_evaluations": exported}
    return {part: list(_selected(rows, names)) for part, names in parts.items()}


def _selected(rows: Sequence[dict[str, Any]], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    for row in rows:
        values = {name: row[key] for name, key in names.items() if key in row}
        if values:
            yield {"step": row["step"], **values}


def recorded() -> tuple[dict[str, str], Curve]:
    """Return the recorded versions and the recorded curve."""
    record = json.loads(RECORD.read_text())
    return record.pop("recorded_with"), record


def versions() -> dict[str, str]:
    """Return the versions that decide whether bits can be compared."""
    return {"torch": torch.__version__.partition("+")[0], "processor": _processor()}


def _processor() -> str:
    """The first processor as Linux reports it: vendor, family, model, a hash of its features."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.is_file() else []
    entries = dict(reversed([line.split("\t", 1) for line in lines if "\t" in line]))
    known = [entries.get(key, "").strip("\t :") for key in ("vendor_id", "cpu family", "model")]
    features = hashlib.sha256(entries.get("flags", "").encode()).hexdigest()[:8]
    return " ".join(filter(None, [platform.machine(), *known, features]))


def differences(expected: Curve, found: Curve, *, exact: bool) -> list[str]:
    """One line for each value that differs.

    Without `exact`, by more than 5 %, and by more than 0.02 where tokens are evicted: a decision
    that falls the other way moves a mean by 0.01. With the processor's own vector code and two
    threads, no gradient norm of this run moved by more than 1.3 %, nothing else by more than 0.3 %;
    between two processor models with `SAME_BITS`, nothing by more than 0.3 %.
    """
    lines = []
    for part in sorted({*expected, *found}):
        before, after = _by_step(expected.get(part, [])), _by_step(found.get(part, []))
        for step in sorted({*before, *after}):
            old, other = before.get(step, {}), after.get(step, {})
            absolute = 0.02 if "ratio" in old else 0.0
            for name in dict.fromkeys([*old, *other]):
                a, b = old.get(name), other.get(name)
                if a != b and (exact or not _close(a, b, absolute)):
                    lines.append(f"{part}, step {step}, {name}: recorded {a!r}, found {b!r}")
    return lines


def _by_step(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in rows}


def _close(old: Any, other: Any, absolute: float) -> bool:
    if isinstance(old, list) and isinstance(other, list):
        pairs = zip(old, other, strict=False)
        return len(old) == len(other) and all(_close(a, b, absolute) for a, b in pairs)
    if isinstance(old, float) and isinstance(other, float):
        return math.isclose(old, other, rel_tol=0.05, abs_tol=absolute)
    return bool(old == other)


def write(curve: Curve) -> None:
    """Store a curve, one step a line."""
    parts = [f'"recorded_with": {json.dumps(versions())}']
    for part, rows in curve.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        parts.append(f'"{part}": [\n{lines}\n ]')
    RECORD.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def main() -> None:
    """Print, and with --write store, what differs from the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the values found")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    expected = recorded()[1] if RECORD.is_file() else {}
    print("\n".join(differences(expected, found, exact=True)) or "nothing differs")
    if wanted.write:
        write(found)


if __name__ == "__main__":
    main()
