"""Tiny random models, and an independent float64 forward to hold the shipped code against."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dms_train.export.writer import write_export
from dms_train.families import FAMILIES, LayerAttention
from dms_train.hf.architecture import Architecture
from dms_train.hf.formats import default_format
from dms_train.hf.rope import RopeScaling
from dms_train.hf.stored_tensors import to_stored
from dms_train.hf.tensors import expected_shapes
from dms_train.method.dms.spec import DMSSpec
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import visible
from tests.support import yarn
from tests.support.experts import experts_of
from tests.support.plain_delta import delta_net, sizes_of

Weights = dict[str, Tensor]


@pytest.fixture(scope="session")
def stories() -> Path:
    """The real 260k-parameter Llama."""
    default = Path(__file__).resolve().parents[3].parent / "shared" / "data"
    path = Path(os.environ.get("DMS_TEST_DATA", default)) / "stories260k-hf"
    if not path.is_dir():
        pytest.skip(f"{path} is absent; point DMS_TEST_DATA to the folder that holds it")
    return path


LAYERS = {
    "gpt_oss": (LayerAttention(rotary_base=5e5, window=7), LayerAttention(rotary_base=5e5)),
    "gemma3_text": (LayerAttention(rotary_base=1e4, window=7), LayerAttention(rotary_base=1e6)),
    "olmo3": (LayerAttention(rotary_base=5e5, window=7), LayerAttention(rotary_base=5e5)),
    "qwen3_5_text": (
        LayerAttention(rotary_base=None, linear=True),
        LayerAttention(rotary_base=1e6),
    ),
    "qwen3_next": (
        LayerAttention(rotary_base=None, linear=True),
        LayerAttention(rotary_base=1e6),
    ),
    "smollm3": (LayerAttention(rotary_base=None), LayerAttention(rotary_base=1e6)),
}


RULES = {"gpt_oss": yarn.UNROUNDED, "olmo3": yarn.RULE}


def _architecture(family: str) -> Architecture:
    llama3 = RopeScaling(
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    linear = RopeScaling(factor=4.0, rope_type="linear")
    return Architecture(
        family=family,
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=24 if family == "gpt_oss" else 48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        vocab_size=61,
        max_position_embeddings=256,
        rotary_base={"llama": 1e4, "gpt_oss": 5e5, "olmo3": 5e5}.get(family, 1e6),
        layernorm_epsilon=1e-6,
        tie_word_embeddings=family in ("qwen3", "gemma3_text"),
        rope_scaling={**RULES, "llama": llama3, "gemma3_text": linear}.get(family),
        experts=experts_of(family),
        layers=LAYERS.get(family, ()),
        query_scalar=5 if family == "gemma3_text" else None,
        partial_rotary_factor=0.5 if FAMILIES[family].rotary_factor else 1.0,
        linear=sizes_of(family),
    )


@pytest.fixture(scope="session")
def architecture() -> Callable[[str], Architecture]:
    """family -> a 2-layer architecture; llama with llama3 RoPE scaling, qwen3 tied."""
    return _architecture


def _weights(a: Architecture, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(a).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            centered = FAMILIES[a.family].centered_norms and "linear_attn" not in name
            weights[name] = 0.2 * noise + (0.0 if centered else 1.0)
        else:
            weights[name] = noise * (0.3 if name.endswith(("bias", "sinks")) else shape[-1] ** -0.5)
    weights["model.embed_tokens.weight"] *= 4.0
    return weights


@pytest.fixture(scope="session")
def random_weights() -> Callable[..., Weights]:
    """(architecture, seed=0) -> float32 weights with which about half of all tokens evict."""
    return _weights


def in_memory(weights: Weights, a: Architecture) -> Weights:
    """The tensors as transformers 5 holds them: one tensor for the experts of a layer."""
    files = to_stored(a, weights.items())
    if a.described.stacked_experts:
        return dict(files)
    joined = {name: tensor for name, tensor in files if ".experts." not in name}
    for layer in range(a.num_layers if a.experts else 0):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([weights[f"{at}.{n}.{part}_proj.weight"] for n in range(a.experts.count)])
            for part in ("gate", "up", "down")
        )
        joined |= {f"{at}.gate_up_proj": torch.cat([gate, up], 1), f"{at}.down_proj": down}
    return joined


def small_spec(preset: str, window: int = 4) -> DMSSpec:
    """A preset with a window that short sequences leave."""
    return PRESETS[preset].override(window=window).spec


@pytest.fixture(scope="session")
def spec() -> Callable[..., DMSSpec]:
    """(preset, window=4) -> specification."""
    return small_spec


def _norm(x: Tensor, weight: Tensor, a: Architecture) -> Tensor:
    weight = 1 + weight if FAMILIES[a.family].centered_norms else weight
    return x * (x.pow(2).mean(-1, keepdim=True) + a.layernorm_epsilon).rsqrt() * weight


def _frequencies(a: Architecture) -> Tensor:
    base = a.layers[0].rotary_base
    rotated = round(a.kv_channels * a.partial_rotary_factor)
    inverse = base ** -(torch.arange(0, rotated, 2).double() / rotated)
    inverse = torch.cat([inverse, inverse.new_zeros((a.kv_channels - rotated) // 2)])
    s = a.rope_scaling
    if s is None or (a.layers[0].window is not None and a.family != "gpt_oss"):
        return inverse
    if s.rope_type == "linear":
        return inverse / s.factor
    if s.rope_type == "yarn":
        return torch.tensor(yarn.frequencies(s, base, a.kv_channels // 2)).double()
    turns = s.original_max_position_embeddings * inverse / (2 * math.pi)
    share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    share = share.clamp(0, 1)
    return inverse * (share + (1 - share) / s.factor)


def _rotate(x: Tensor, a: Architecture) -> Tensor:
    angle = torch.arange(x.shape[0]).double()[:, None] * _frequencies(a)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    if a.family == "gpt_oss" or (a.family == "olmo3" and a.layers[0].window is None):
        x = x * a.rope_scaling.attention_factor
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attention(
    x: Tensor, w: Callable[[str], Tensor], a: Architecture, s: DMSSpec
) -> tuple[Tensor, Tensor]:
    states = {}
    for n, heads in (("q", a.num_attention_heads), ("k", a.num_query_groups), ("v", 0)):
        y = x @ w(f"{n}_proj.weight").T
        y = y + w(f"{n}_proj.bias") if a.add_qkv_bias else y
        if a.family == "olmo3" and n != "v":  # over all heads
            y = _norm(y, w(f"{n}_norm.weight"), a)
        y = y.view(len(x), heads or a.num_query_groups, a.kv_channels)
        if a.qk_layernorm and a.family != "olmo3" and n != "v":
            y = _norm(y, w(f"{n}_norm.weight"), a)
        states[n] = y
    group = a.num_attention_heads // a.num_query_groups
    decision = s.alpha_scale * states["q"][:, ::group, s.channel].T - s.alpha_offset
    allowed, window = visible(decision > 0, s), a.layers[0].window
    if window is None:
        states["q"][:, ::group, s.channel] = 0
    else:
        ages = torch.arange(len(x))[:, None] - torch.arange(len(x))
        allowed = ((ages >= 0) & (ages < window)).expand(a.num_query_groups, -1, -1)
    q, k = states["q"], states["k"]
    if a.layers[0].rotary_base is not None:
        q, k = _rotate(q, a), _rotate(k, a)
    if s.clear_after_rope and window is None:
        q[:, ::group, s.channel] = 0
    outputs = []
    for head in range(a.num_attention_heads):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(a.query_scalar or a.kv_channels)
        scores = scores.masked_fill(~allowed[head // group], -torch.inf)
        weights = scores.softmax(-1)
        if a.family == "gpt_oss":
            weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + w("sinks")[head].exp())
        outputs.append(weights @ states["v"][:, head // group])
    joined = torch.cat(outputs, -1)
    if FAMILIES[a.family].output_gate:
        joined = joined * (x @ w("gate_proj.weight").T).sigmoid()
    update = joined @ w("o_proj.weight").T
    return update + (w("o_proj.bias") if a.family == "gpt_oss" else 0), decision


def _swiglu(x: Tensor, w: Callable[[str], Tensor], prefix: str = "") -> Tensor:
    gate, up = (x @ w(f"{prefix}{n}_proj").T for n in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ w(f"{prefix}down_proj").T


def _geglu(x: Tensor, w: Callable[[str], Tensor]) -> Tensor:
    gate, up = (x @ w(f"{n}_proj").T for n in ("gate", "up"))
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (gate * (1 + inner.tanh()) / 2 * up) @ w("down_proj").T


def _clamped_swiglu(x: Tensor, w: Callable[[str], Tensor], prefix: str) -> Tensor:
    gate, up = (
        x @ w(f"{prefix}{n}_proj.weight").T + w(f"{prefix}{n}_proj.bias") for n in ("gate", "up")
    )
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    inner = (up + 1) * gate / (1 + (-1.702 * gate).exp())
    return inner @ w(f"{prefix}down_proj.weight").T + w(f"{prefix}down_proj.bias")


def _biased_mixture(x: Tensor, w: Callable[[str], Tensor], a: Architecture) -> Tensor:
    """Experts of gpt-oss: a softmax over the best logits of the router."""
    logits = x @ w("gate.weight").T + w("gate.bias")
    best = logits.topk(a.experts.topk).values
    shares = logits.masked_fill(logits < best[:, -1:], -torch.inf).softmax(-1)
    outputs = [_clamped_swiglu(x, w, f"experts.{n}.") for n in range(a.experts.count)]
    return (torch.stack(outputs, 1) * shares[..., None]).sum(1)


def _mlp(x: Tensor, w: Callable[[str], Tensor], a: Architecture) -> Tensor:
    if a.family == "gemma3_text":
        return _geglu(x, w)
    if a.experts is None:
        return _swiglu(x, w)
    shares = (x @ w("gate").T).softmax(-1)
    unused = shares < shares.topk(a.experts.topk).values[:, -1:]
    shares = shares.masked_fill(unused, 0.0)
    if a.experts.normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    outputs = [_swiglu(x, w, f"experts.{n}.") for n in range(a.experts.count)]
    update = (torch.stack(outputs, 1) * shares[..., None]).sum(1)
    if FAMILIES[a.family].shares_expert:
        update = update + (x @ w("shared_expert_gate").T).sigmoid() * _swiglu(
            x, w, "shared_expert."
        )
    return update


def _forward(weights: Weights, a: Architecture, s: DMSSpec, ids: Tensor) -> tuple[Tensor, Tensor]:
    w = {name: tensor.double() for name, tensor in weights.items()}
    x, decisions = w["model.embed_tokens.weight"][ids], []
    olmo, gemma = a.family == "olmo3", a.family == "gemma3_text"
    sandwich = gemma or a.family == "glm4"
    if gemma:
        x = x * a.hidden_size**0.5
    before_mlp = f"{'pre_feedforward' if sandwich else 'post_attention'}_layernorm.weight"
    for layer in range(a.num_layers):
        at = f"model.layers.{layer}."
        normed = x if olmo else _norm(x, w[at + "input_layernorm.weight"], a)
        alone = replace(a, layers=a.attention_layers[layer : layer + 1])
        if alone.layers[0].linear:
            update = delta_net(normed, lambda n, at=at: w[f"{at}linear_attn.{n}"], a)
        else:
            own = lambda n, at=at: w[f"{at}self_attn.{n}"]  # noqa: E731
            update, decision = _attention(normed, own, alone, s)
        if sandwich or olmo:
            update = _norm(update, w[at + "post_attention_layernorm.weight"], a)
        x = x + update
        if alone.layers[0].window is None and not alone.layers[0].linear:
            decisions.append(decision)
        normed = x if olmo else _norm(x, w[at + before_mlp], a)
        if a.family == "gpt_oss":
            update = _biased_mixture(normed, lambda n, at=at: w[f"{at}mlp.{n}"], a)
        else:
            update = _mlp(normed, lambda n, at=at: w[f"{at}mlp.{n}.weight"], a)
        if sandwich or olmo:
            update = _norm(update, w[at + "post_feedforward_layernorm.weight"], a)
        x = x + update
    x = _norm(x, w["model.norm.weight"], a)
    head = "model.embed_tokens.weight" if a.tie_word_embeddings else "lm_head.weight"
    return x @ w[head].T, torch.stack(decisions)


@pytest.fixture(scope="session")
def reference_forward() -> Callable[..., tuple[Tensor, Tensor]]:
    """(weights, architecture, spec, ids [T]) -> float64 logits [T, vocab], decisions [L, Hk, T]."""
    return _forward


@pytest.fixture(scope="session")
def load() -> Callable:
    """directory -> float32 model, loaded the way a user would."""
    from transformers import AutoModelForCausalLM

    def _load(directory: Path, **kwargs):
        kwargs = {"trust_remote_code": True, "dtype": torch.float32, **kwargs}
        return AutoModelForCausalLM.from_pretrained(directory, **kwargs).eval()

    return _load


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Path]:
    """(family, spec, **overrides of write_export) -> export directory."""

    def _export(family: str, s: DMSSpec | None, **overrides) -> Path:
        a = _architecture(family)
        arguments = {
            "architecture": a,
            "spec": s,
            "cr_factor": None,
            "target_cr": 4.0,
            "dtype": torch.float32,
            "export_format": "dms" if s is None else default_format(s),
            "weights": _weights(a).items(),
            "source_dir": None,
            "selftest": None,
            "block_size": 2,
            "provenance": {"step": 7},
            **overrides,
        }
        out = tmp_path / "export"
        write_export(out, **arguments)
        return out

    return _export
