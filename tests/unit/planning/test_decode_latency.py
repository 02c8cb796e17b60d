"""The latency model against the checks of the paper's appendix G, without its two misprints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dms_train.families import LayerAttention
from dms_train.hf.architecture import Architecture
from dms_train.planning.decode_latency import decode_step
from dms_train.planning.gpus import GPUS

H100 = GPUS["h100"]


def model(layers, hidden, ffn, d_kv, vocabulary, head=128) -> Architecture:
    return Architecture(
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=hidden // head,
        num_query_groups=d_kv // head,
        kv_channels=head,
        vocab_size=vocabulary,
        max_position_embeddings=131072,
        rotary_base=1e4,
        layernorm_epsilon=1e-5,
        tie_word_embeddings=False,
        rope_scaling=None,
    )


LLAMA = model(32, 4096, 14336, 1024, 128256)
QWEN_1_5B = model(28, 1536, 8960, 256, 151936)
QWEN_7B = model(28, 3584, 18944, 512, 152064)


def test_coefficients_of_llama_3_1_8b():
    """About 7.5e9 parameters are read; slopes of 5.24e5 and 1.31e5 (equations 4 and 5)."""
    empty = decode_step(LLAMA, H100, batch=1, length=0)
    assert empty.reads == pytest.approx(1.5009e10, rel=1e-4)
    assert empty.reads / 2 == pytest.approx(7.5e9, rel=1e-3)
    assert empty.flops == pytest.approx(1.5009e10, rel=1e-4)
    one = decode_step(LLAMA, H100, batch=1, length=1)
    assert one.flops - empty.flops == 5.24288e5
    assert one.reads - empty.reads == 1.31072e5 == one.kv_reads


@pytest.mark.parametrize(
    ("architecture", "batch", "length", "milliseconds", "share"),
    [
        (LLAMA, 1, 8192, 4.8009, None),
        (LLAMA, 256, 8192, 86.533, 94.82),
        (LLAMA, 256, 32768, 332.69, 98.65),
        (QWEN_1_5B, 256, 8192, None, 95.1),
        (QWEN_7B, 256, 8192, None, 89.5),
    ],
)
def test_latency_and_share_of_the_kv_cache(architecture, batch, length, milliseconds, share):
    found = decode_step(architecture, H100, batch=batch, length=length)
    assert found.memory_bound
    if milliseconds is not None:
        assert found.seconds * 1e3 == pytest.approx(milliseconds, rel=2e-5)
    if share is not None:
        assert 100 * found.kv_share == pytest.approx(share, abs=0.05)


def test_compression_divides_the_length():
    for cr in (2.0, 4.0, 8.0):
        compressed = decode_step(LLAMA, H100, batch=256, length=8192, cr=cr)
        assert compressed == decode_step(LLAMA, H100, batch=256, length=int(8192 / cr))
    assert decode_step(LLAMA, H100, batch=256, length=8192, cr=8).kv_share < 0.75


def test_compression_leaves_layers_with_a_window_as_they_are():
    full, local = (LayerAttention(rotary_base=1e4, window=window) for window in (None, 1024))
    a = replace(LLAMA, family="qwen3", layers=(local, full) * 16)
    for length, held in ((8192, 16 * (1024 + 2048)), (512, 16 * (512 + 128))):
        found = decode_step(a, H100, batch=3, length=length, cr=4.0)
        assert found.kv_reads == 3 * held * 2 * 2 * 1024  # keys and values of 2 bytes
        empty = decode_step(a, H100, batch=3, length=0)
        assert found.flops - empty.flops == 3 * held * 2 * 2 * 4096


def test_a_large_batch_of_short_texts_is_bound_by_computation():
    found = decode_step(LLAMA, H100, batch=4096, length=1)
    assert not found.memory_bound
    assert found.seconds == found.flops / 989e12
