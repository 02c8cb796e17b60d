"""Cases of a training step: model shapes, parallel layouts and their FLOPs."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.records import ROOT
from dms_train.cli.config_source import compose
from dms_train.hf.architecture import Architecture
from dms_train.hf.rope import RopeScaling
from dms_train.mcore.options import Trainable
from dms_train.method.spec import PRESETS
from dms_train.planning.flops import forward_flops_per_token, student_flops_per_token

METHODS = ("dms", "dmc")  # with a teacher and relaxed decisions
KINDS = ("lm", "distill", *METHODS)
SUBJECTS = ("peer", "ours")
LAYERS = ("auto", "local", "transformer_engine")
_LABELS = {"lm": "LM loss", "distill": "teacher + KL"}
_LABELS |= {name: f"teacher + KL + {name.upper()}" for name in METHODS}
_LAYOUT_WORD = re.compile(r"(tp|pp|vp|cp|dp|last)(\d+)|sp|overlap")


def _qwen2(layers: int, hidden: int, ffn: int, heads: tuple[int, int], tied: bool) -> Architecture:
    return Architecture(
        family="qwen2",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        kv_channels=128,
        vocab_size=151936 if tied else 152064,
        max_position_embeddings=32768,
        rotary_base=1e6,
        layernorm_epsilon=1e-6,
        tie_word_embeddings=tied,
    )


def _llama3(layers: int, hidden: int, ffn: int, channels: int, tied: bool) -> Architecture:
    return Architecture(
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=channels,
        vocab_size=128256,
        max_position_embeddings=131072,
        rotary_base=5e5,
        layernorm_epsilon=1e-5,
        tie_word_embeddings=tied,
        rope_scaling=RopeScaling(factor=32.0 if tied else 8.0),
    )


# Too large for the GPUs that were measured: its step is projected (`train_step_projection`).
QWEN_32B = _qwen2(64, 5120, 27648, (40, 8), tied=False)
_SMOLLM2 = Architecture(
    family="llama",
    num_layers=30,
    hidden_size=576,
    ffn_hidden_size=1536,
    num_attention_heads=9,
    num_query_groups=3,
    kv_channels=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    rotary_base=1e5,
    layernorm_epsilon=1e-5,
    tie_word_embeddings=True,
)
_TINY = Architecture(
    family="qwen2",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    vocab_size=301,
    max_position_embeddings=512,
    rotary_base=1e4,
    layernorm_epsilon=1e-6,
    tie_word_embeddings=True,
)


def _of_experiment(name: str) -> tuple[Architecture, int, int]:
    """Return architecture, length and samples of an experiment that pretrains."""
    config = compose([f"experiment={name}"], ROOT / "research" / "conf")
    assert config.model.architecture is not None
    return config.model.architecture, config.data.seq_length, config.data.micro_batch_size


# Architecture, sequence length and samples of a microbatch.
SHAPES: dict[str, tuple[Architecture, int, int]] = {
    "qwen2.5-1.5b": (_qwen2(28, 1536, 8960, (12, 2), tied=True), 8192, 1),
    "llama3.2-1b": (_llama3(16, 2048, 8192, 64, tied=True), 4096, 4),
    "llama3.2-1b-64k": (_llama3(16, 2048, 8192, 64, tied=True), 65536, 1),
    "qwen2.5-7b": (_qwen2(28, 3584, 18944, (28, 4), tied=False), 8192, 1),
    "qwen2.5-7b-half": (_qwen2(14, 3584, 18944, (28, 4), tied=False), 8192, 1),  # fits one GPU
    "llama3.1-8b": (_llama3(32, 4096, 14336, 128, tied=False), 8192, 1),
    "smollm2-135m": (_SMOLLM2, 2048, 16),
    "lab-s": _of_experiment("lab_teacher_s"),
    "tiny": (_TINY, 128, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel layout: number of processes, and division of the work.

    `last` is the number of layers of the last pipeline stage; None for an even share. `overlap`
    is `parallel.tp_comm_overlap`.
    """

    tp: int = 1
    pp: int = 1
    vp: int | None = None
    cp: int = 1
    dp: int = 1
    sp: bool = False
    last: int | None = None
    overlap: bool = False

    @property
    def world(self) -> int:
        """Processes, one for each GPU."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def label(self) -> str:
        """The words `parse_layout` reads."""
        names = ("tp", "pp", "vp", "cp", "dp")
        sizes = {name: getattr(self, name) or 1 for name in names}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        words += [f"last{self.last}"] * (self.last is not None) + ["sp"] * self.sp
        words += ["overlap"] * self.overlap
        return "_".join(words) or "dp1"


def parse_layout(text: str) -> Layout:
    """Read a layout such as `tp2_sp`, `pp2_vp2` or `dp2`; ValueError for another word."""
    values: dict[str, Any] = {}
    for word in text.split("_"):
        match = _LAYOUT_WORD.fullmatch(word)
        if match is None:
            raise ValueError(
                f"layout {text}: {word!r} is none of tpN, ppN, vpN, cpN, dpN, lastN, sp, overlap"
            )
        values[match[1] or word] = int(match[2]) if match[1] else True
    return Layout(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement.

    Attributes:
        subject: `ours`, or `peer`, which is megatron-core's own model.
        kind: `lm`, `distill` (teacher and KL), `dms` (that and relaxed evictions) or `dmc`
            (relaxed merges in their place).
        layers: `parallel.layers` of ours, `local` or `transformer_engine` of the peer.
        microbatches: Micro-batches of one data-parallel rank in a step.
        recompute: `parallel.recompute_granularity`, or `mlp` for selective recomputation of MLPs.
        cuda_graph: `parallel.cuda_graph` of ours; the peer has none.
        trains: `method.train` of ours; the peer trains all weights.
        offloads: `teacher.offload` of ours.
        fp8: `parallel.fp8` of ours; the peer computes in bf16.
        offloads_optimizer: `optim.offload` of ours.
        state_dtype: `optim.state_dtype` of ours.
        warmup: Steps before those that are measured.
        profile: True to profile the kernels of a further step.
    """

    shape: str
    subject: str
    kind: str
    layout: Layout = Layout()
    layers: str = "auto"
    microbatches: int = 1
    recompute: str | None = None
    cuda_graph: str = "auto"
    trains: str = "all"
    offloads: bool = False
    fp8: bool = False
    offloads_optimizer: bool = False
    state_dtype: str = "fp32"
    warmup: int = 3
    steps: int = 10
    profile: bool = False

    @property
    def setting(self) -> dict[str, Any]:
        """The case without its numbers of steps."""
        how = ("warmup", "steps", "profile")
        return {name: value for name, value in self.to_dict().items() if name not in how}

    @property
    def known(self) -> bool:
        """Return whether the subject supports this case.

        An offloaded teacher needs weights of its own. The peer has no method, no pipeline, no
        context parallelism, no overlap, and KL of whole rows. Its local layers have no sequence
        parallelism.
        """
        if self.subject == "ours":
            return not self.offloads or (self.kind != "lm" and self.trains == "all")
        whole = self.kind == "lm" or self.layout.tp == 1
        spread = not self.layout.sp or self.layers == "transformer_engine"
        plain = self.kind not in METHODS and self.trains == "all" and not self.layout.overlap
        return plain and self.layout.pp == self.layout.cp == 1 and whole and spread

    @property
    def label(self) -> str:
        """Name of the row."""
        subject = "ours" if self.subject == "ours" else "megatron-core"
        graph = ", eager" if self.subject == "ours" and self.cuda_graph == "never" else ""
        trains = "" if self.trains == "all" else f", train={self.trains}"
        how = f"{self.layers}{', FP8' * self.fp8}{graph}{trains}{self.memory}"
        return f"{subject} ({how}): {_LABELS[self.kind]}"

    @property
    def memory(self) -> str:
        """Settings of teacher and optimizer that save memory, in words after a comma each."""
        moments = "" if self.state_dtype == "fp32" else f", {self.state_dtype} moments"
        teacher = ", teacher offloaded" * self.offloads
        return teacher + ", optimizer offloaded" * self.offloads_optimizer + moments

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """Invert `to_dict`."""
        return cls(**{**values, "layout": Layout(**values["layout"])})

    @property
    def tokens(self) -> int:
        """Number of tokens of one step over all processes."""
        _, length, size = SHAPES[self.shape]
        return length * size * self.microbatches * self.layout.dp

    @property
    def model_flops(self) -> float:
        """FLOPs of one step: student, teacher if there is one, and causal attention."""
        architecture, length, _ = SHAPES[self.shape]
        method = PRESETS[self.kind if self.kind in METHODS else "dms"]
        student = student_flops_per_token(
            architecture, length, Trainable(weights=self.trains), method
        )
        teacher = forward_flops_per_token(architecture, length) * (self.kind != "lm")
        return self.tokens * (student + teacher)
