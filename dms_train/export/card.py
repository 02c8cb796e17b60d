"""Model card of an export: README.md with the front matter that the Hugging Face hub reads.

It states known facts only: a licence that the base model's own card does not name is
`unknown`. Written with PyYAML, so that a machine that trains needs no huggingface_hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import resolve
from dms_train.hf.formats import ExportedModel, ExportFormat
from dms_train.hf.gguf_directory import describe_types, is_gguf, read_gguf_record
from dms_train.hf.typed import typed
from dms_train.method.base import MethodSpec
from dms_train.tables import markdown_table
from dms_train.training.state import describe_early_stop

CARD_FILE = "README.md"
UNKNOWN = "unknown"
_NO_TITLES = ("", "")
_HASH_DIGITS = 16
POOLED_FROM = "pooled_kv_heads"
"""Key of an export's provenance: KV heads of the base model, if they were averaged."""
TRAINING_DATA = "training_data"
"""Key of an export's provenance: for each run that trained it, the origins of its text."""
EARLY_STOP = "early_stop"
"""Key of an export's provenance: the record of an annealing that ended at its KL limit."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Keys of the base model's front matter that hold for the retrofitted model, too.
_INHERITED = ("license", "license_name", "license_link", "language")
_BEGIN, _END = "<!-- evaluation -->", "<!-- end of evaluation -->"
_MEASURED = {
    "kl_nats_per_token": "KL(original, this model), nats per token",
    "top1_agreement": "most likely token agrees with the original's",
    "teacher.accuracy": "accuracy of the original",
    "student.accuracy": "accuracy of this model",
    "window_only.accuracy": "accuracy of the original with the window alone",
    "problems": "problems",
    "cr_factor": "tokens seen per token held",
    "kv_reads.dense": "KV reads per sequence, original",
    "kv_reads.student": "KV reads per sequence, this model",
    "peak_tokens.dense": "most tokens held by a sequence, original",
    "peak_tokens.student": "most tokens held by a sequence, this model",
    "selftest.kl": "KL of the self-test through the compact cache, nats per token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """Facts about the original of a retrofitted model.

    Attributes:
        name: Hub id or name of its folder; None for a model trained from scratch.
        hub_id: Its id on the hub, if the run named the model by its id, or the card of a converted
            GGUF file names the model that was quantised.
        front_matter: Inherited keys of the model's own card.
        converted: Phrase that states the conversion of a GGUF file; None for other models.
    """

    name: str | None = None
    hub_id: str | None = None
    front_matter: dict[str, Any] = field(default_factory=dict)
    converted: str | None = None

    @property
    def license(self) -> str:
        """Identifier of its licence, or `unknown`."""
        return str(self.front_matter.get("license", UNKNOWN))


@typed
def read_base(model: str | None) -> BaseModel:
    """Describe a base model from its directory, or from the local hub cache; no network.

    Args:
        model: Directory, GGUF file or hub id; None for a model trained from scratch.
    """
    if model is None:
        return BaseModel()
    path = Path(model).expanduser()
    is_id = not (path.is_dir() or is_gguf(path)) and _HUB_ID.fullmatch(model) is not None
    front, record = {}, None
    try:
        directory = resolve(model)
        front, record = _front_matter(directory / CARD_FILE), read_gguf_record(directory)
    except FileNotFoundError:
        pass  # the licence stays unknown
    hub_id = model if is_id else None
    if record is not None and isinstance(front.get("base_model"), str):
        hub_id = front["base_model"]
    return BaseModel(
        name=hub_id or Path(model).name,
        hub_id=hub_id,
        front_matter={key: front[key] for key in _INHERITED if _is_stated(front.get(key))},
        converted=None if record is None else describe_types(record),
    )


def _front_matter(card: Path) -> dict[str, Any]:
    """Read the mapping between the first two `---` lines of a card; empty if there is none."""
    if not card.is_file():
        return {}
    text = card.read_text(encoding="utf-8", errors="replace")
    match = re.match(r"---\r?\n(.*?)\r?\n---\s", text, re.DOTALL)
    try:
        values = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _is_stated(value: Any) -> bool:
    words = value if isinstance(value, list) else [value]
    return bool(words) and all(isinstance(word, str) and word for word in words)


@typed
def render(
    architecture: Architecture,
    base: BaseModel,
    compressed: tuple[ExportedModel, ExportFormat] | None,
    provenance: Mapping[str, Any],
    code_files: Collection[str] = (),
) -> str:
    """Write the card of an export.

    Args:
        architecture: The model.
        base: Model that the export was made from.
        compressed: Retrofitted model and its format; None for a dense model.
        provenance: JSON values that state where the weights come from; `TRAINING_DATA` and
            `POOLED_FROM` are read.
        code_files: Names of the export's code files for transformers.
    """
    origin = [*_origin(base, provenance), ("family", architecture.family)]
    if base.converted is not None:
        origin.append(("weights of the base model", base.converted))
    pooled_from = provenance.get(POOLED_FROM)
    training_data = _training_data(provenance.get(TRAINING_DATA, []))
    title = Path(base.name).name if base.name else f"A {architecture.family} model"
    sections = [_header(base, None if compressed is None else compressed[0].spec)]
    if compressed is None:
        sections += [
            f"# {title}",
            "A dense model exported by dms-train.",
            *([] if pooled_from is None else [_pooled(architecture, pooled_from)]),
            markdown_table(_NO_TITLES, origin),
            *training_data,
            _loading(code_files, None),
        ]
    else:
        model, layout = compressed
        sections += [
            f"# {title} with {model.spec.label}",
            _summary(model.spec),
            markdown_table(_NO_TITLES, [*origin, *_training(model, layout)]),
            *training_data,
            "## Method",
            f"Constants of the retrofit (preset `{model.spec.preset}`):",
            markdown_table(_NO_TITLES, [(f"`{k}`", v) for k, v in asdict(model.spec).items()]),
            "## Evaluation",
            f"{_BEGIN}\nNot evaluated.\n{_END}",
            _loading(code_files, layout),
        ]
    return "\n\n".join(sections) + "\n"


def _header(base: BaseModel, spec: MethodSpec | None) -> str:
    """Write the YAML block at the top of a card."""
    front: dict[str, Any] = {"license": UNKNOWN, **base.front_matter}
    if base.hub_id is not None:
        front["base_model"] = base.hub_id
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if spec is not None:
        front["tags"] = _tags(spec)
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---"


def _origin(base: BaseModel, provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that name the base model and its licence."""
    no_base = "none: trained from scratch" if "model" in provenance else UNKNOWN
    return [
        ("base model", base.name or no_base),
        ("licence of the base model", base.license if base.name else no_base.partition(":")[0]),
    ]


def _pooled(architecture: Architecture, before: int) -> str:
    per_head = before // architecture.num_query_groups
    return (
        f"Each KV head is the mean of {per_head} of the base model's. The model was not trained "
        "afterwards, which it needs before it is used."
    )


def _tags(spec: MethodSpec) -> list[str]:
    return [spec.full_name.lower().replace(" ", "-"), spec.kind, "kv-cache-compression"]


def _summary(spec: MethodSpec) -> str:
    return (
        f"Retrofitted with [{spec.full_name}]({spec.paper}) ({spec.label}) by dms-train: "
        f"{spec.summary}. The weights have the names and shapes of the original."
    )


def _training(model: ExportedModel, layout: ExportFormat) -> list[tuple[str, Any]]:
    stop = model.provenance.get(EARLY_STOP)
    measured = "not measured" if model.cr_factor is None else f"{model.cr_factor:.4g}"
    base = model.adapter_base
    needed = [] if base is None else [("weights", f"an adapter of `{base.name}`, read with it")]
    return [
        ("export format", f"`{layout.name}`, for {layout.consumer}"),
        *needed,
        ("dtype", model.dtype),
        ("training step", model.provenance.get("step", UNKNOWN)),
        ("compression ratio asked for in training", f"{model.target_cr:g}"),
        ("compression ratio on the text of the self-test", measured),
        *([] if stop is None else [("early stop", describe_early_stop(stop))]),
    ]


def _training_data(runs: list[list[dict[str, Any]]]) -> list[str]:
    """Describe the text of each run; nothing for a model without a record of it."""
    rows = [
        (
            number,
            *(" ".join(str(origin[key] or "-").split()) for key in ("source", "license", "model")),
            f"{origin['share']:.1%}",
            f"`{origin['sha256'][:_HASH_DIGITS]}`",
        )
        for number, origins in enumerate(runs, 1)
        for origin in origins
    ]
    if not rows:
        return []
    return [
        "## Training data",
        "Shares are shares of the tokens of a run. Licences are those that were stated when the "
        "data was made. The hash identifies the token file.",
        markdown_table(("run", "source", "licence", "generated by", "share", "SHA-256"), rows),
    ]


_TRANSFORMERS = """With transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(path{trust})
tokenizer = AutoTokenizer.from_pretrained(path{no_code})
```

"""
_OWN_ENGINE = """With dms-train:

```python
from dms_train import LLM, SamplingParams

output = LLM(path).generate("Once upon a time", SamplingParams(max_tokens=200))[0]
print(output.outputs[0].text)
```"""


def _loading(files: Collection[str], layout: ExportFormat | None) -> str:
    """Describe how an export with these code files is loaded."""
    trust, no_code = (f", trust_remote_code={value}" if files else "" for value in (True, False))
    text = "## How to load\n\n`path` is this folder, or its id on the hub. "
    if files or layout is None:
        text += _TRANSFORMERS.format(trust=trust, no_code=no_code)
    text += _OWN_ENGINE
    if files and layout is not None:
        frees = f"generation_{layout.method}.py" in files
        text += (
            "\n\n`trust_remote_code=True` runs the Python files of this folder: read them first. "
            "The tokenizer needs none of them. "
            f"`generate()` {'frees' if frees else 'masks'} what is evicted."
        )
    return text


@typed
def add_evaluation(directory: Path, numbers: Mapping[str, float], further: str = "") -> None:
    """Replace the evaluation section of an export's card; nothing if there is no such section.

    Args:
        directory: The export.
        numbers: Flat metrics of an evaluation, as `metrics.json` has them; those that end in
            `.low` and `.high` are 95% bootstrap intervals.
        further: Text after the table, such as results of benchmarks.
    """
    card = directory / CARD_FILE
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        return
    rows = [(label, _number(name, numbers)) for name, label in _MEASURED.items() if name in numbers]
    table = "\n\n".join(filter(None, (markdown_table(_NO_TITLES, rows), further)))
    partial = card.with_name(f".{card.name}.partial")
    partial.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")
    os.replace(partial, card)


def _number(name: str, numbers: Mapping[str, float]) -> str:
    value = f"{numbers[name]:.4g}" if abs(numbers[name]) < 1e4 else f"{numbers[name]:,.0f}"
    low, high = numbers.get(f"{name}.low"), numbers.get(f"{name}.high")
    return value if low is None or high is None else f"{value} [{low:.4g}, {high:.4g}]"
