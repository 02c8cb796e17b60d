"""A layout that does not fit is refused with its rank and size, and those offered instead fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dms_train.config.build import ConfigError
from dms_train.config.schema import RunConfig
from dms_train.planning import divide, layouts, validation_memory
from dms_train.planning.check import check
from dms_train.planning.gpus import GPUS, calibration, gpu, like
from dms_train.planning.memory import estimate
from dms_train.planning.parameters import parameter_count
from tests.support import configs

BIG = configs.KNOWN["llama31_8b"]
H100 = GPUS["h100"]
TP, PP = "parallel__tensor_model_parallel_size", "parallel__pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
SIZE = {
    "data__seq_length": 4096,
    "data__global_batch_size": 64,
    "parallel__params_dtype": "bf16",
}


def config(**changes) -> RunConfig:
    return configs.config(**SIZE, **changes)


def test_what_does_not_fit_names_ranks_size_and_what_would():
    given = config(**{PP: 2}, cluster={"gpu": "h100"})
    with pytest.raises(ConfigError) as caught:
        check(given, world_size=4, architecture=BIG)
    (line,) = caught.value.problems
    assert "pipeline stage 1 of 2 (ranks 0 to 1) needs" in line
    assert "GiB more than the 79.1 GiB of a H100 SXM 80 GB" in line
    words = line.partition("80 GB: ")[2].partition(" (")[0].split()
    assert words == layouts.search(given, BIG, 4, H100)[0].words(given)


def test_the_layouts_offered_divide_fit_and_are_ranked():
    given = config()
    found = layouts.search(given, BIG, 8, H100)
    assert len(found) > 5
    times = [layout.time.total for layout in found]
    assert times == sorted(times)
    for layout in found:
        assert not list(divide.problems(layout.config, 8, BIG))
        assert layout.needed(calibration()) <= H100.memory
        assert replace(layout.config, parallel=given.parallel, data=given.data) == given


def test_the_words_of_a_layout_make_it():
    given = config()
    for layout in layouts.search(given, BIG, 8, H100)[:5]:
        changes = dict(word.split("=") for word in layout.words(given))
        read = {"null": None, "true": True, "false": False}
        typed = {
            key.replace(".", "__"): read[value]
            if value in read
            else value
            if value.isalpha()
            else int(value)
            for key, value in changes.items()
        }
        assert config(**typed) == layout.config


@pytest.mark.parametrize(("length", "sizes"), [(8192, {1}), (131072, {1, 2, 4, 8})])
def test_long_samples_are_divided_over_context_parallel_ranks(length, sizes):
    changes = {**SIZE, "data__global_batch_size": 8, "data__seq_length": length}
    given = configs.config(**changes)
    found = [layout.config.parallel for layout in layouts.search(given, BIG, 8, H100)]
    divided = {parallel.context_parallel_size for parallel in found}
    assert divided <= sizes
    assert (max(divided) > 1) == (max(sizes) > 1)


def test_gpus_that_no_even_pipeline_divides_get_an_uneven_one():
    model = configs.KNOWN["qwen_r1_32b"]
    found = layouts.search(config(), model, 24, H100)
    assert found
    for layout in found:
        parallel = layout.config.parallel
        pp = parallel.pipeline_model_parallel_size
        assert model.num_layers % pp
        stages = parallel.stage_layers(model.num_layers)
        assert (len(stages), sum(stages)) == (pp, model.num_layers)
        # the other layouts of the same sizes, with the layers moved by one, are not faster
        first, last = stages[0], stages[-1]
        for moved in ((first - 1, last + 1), (first + 1, last - 1)):
            ends = dict(zip((FIRST, LAST), moved, strict=True))
            other = replace(layout.config, parallel=replace(parallel, **ends))
            if min(moved) > 0:
                time = layouts.planned(other, model, 24, H100).time.total
                assert time >= layout.time.total * 0.999


def test_what_does_not_divide_is_answered_with_what_does():
    given = config(**{TP: 3}, cluster={"gpu": "h100"})
    with pytest.raises(ConfigError) as caught:
        check(given, world_size=8, architecture=BIG)
    assert "does not divide the model's num_attention_heads=32" in caught.value.problems[0]
    assert caught.value.problems[-1].startswith(
        "the fastest layout that divides and fits H100 SXM 80 GB: parallel."
    )


def test_too_few_gpus_are_answered_with_how_many_would_do():
    large = configs.KNOWN["qwen_r1_32b"]
    advice = layouts.advice(config(), large, 4, H100)
    more = int(advice.partition("and fits; ")[2].split()[0])
    assert advice.startswith("no layout of 4 H100 SXM 80 GB divides and fits; ")
    assert not layouts.search(config(), large, more // 2, H100)
    assert layouts.search(config(), large, more, H100)
    tiny = H100._replace(memory_gib=1.0)
    assert layouts.advice(config(), large, 4, tiny).startswith(
        "no layout divides and fits on up to 4096"
    )


def test_nothing_is_refused_without_a_gpu_to_fit():
    check(config(), world_size=1, architecture=BIG)


@pytest.mark.parametrize("copies", [1, 2, 4, 8])
def test_more_copies_never_need_more(copies):
    one, more = (estimate(config(), BIG, n) for n in (copies, 2 * copies))
    assert more.optimizer <= one.optimizer
    assert more.total <= one.total


@pytest.mark.parametrize("layout", [{}, {TP: 2}, {PP: 2}, {TP: 2, PP: 2}])
def test_recomputing_more_never_needs_more(layout):
    needed = [
        estimate(config(**layout, parallel__recompute_granularity=granularity), BIG, 8).total
        for granularity in (None, "selective", "full")
    ]
    assert needed == sorted(needed, reverse=True)


def test_gpus_by_name():
    assert gpu("h200").memory > gpu("h100").memory
    with pytest.raises(ConfigError, match="choose one of a100_40gb"):
        gpu("h300")
    found = like("NVIDIA H200", 150 * 10**9)
    assert (found.tflops, found.memory_tbs) == (989, 4.8)
    assert found.memory == pytest.approx(150e9)
    assert like("NVIDIA Something", 10**9).tflops == GPUS["h100"].tflops


@pytest.mark.parametrize(
    ("name", "dtype", "gpu", "fits"),
    [
        ("qwen3_14b", "bf16", "h100", True),
        ("qwen3_32b", "bf16", "h100", True),
        ("qwen3_32b", "bf16", "a100_40gb", False),
        ("qwen3_32b", "fp32", "h100", False),
        ("llama31_8b", "fp32", "h100", True),
    ],
)
def test_a_validation_takes_one_model_at_a_time(name, dtype, gpu, fits):
    model, known = configs.KNOWN[name], GPUS[gpu]
    given = config(stage__export={"dtype": dtype})
    width = {"bf16": 2, "fp32": 4}[dtype]
    weights = width * parameter_count(model)
    needed = validation_memory.needed_bytes(given, model)
    assert weights < needed < 1.1 * weights + 3 * 2**30
    line = validation_memory.problem(given, model, known.label, known.memory)
    assert (line is None) == fits
    if not fits:
        assert f"needs {needed / 2**30:.1f} GiB of one GPU, a {known.label} has" in line
    on_cpu = config(stage__export={"dtype": dtype}, stage__validate_export={"device": "cpu"})
    assert validation_memory.problem(on_cpu, model, known.label, known.memory) is None
