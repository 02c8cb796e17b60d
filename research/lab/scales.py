"""Sizes of the lab: generated data, trainings and evaluations of one teacher."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrofit:
    """Anneal with its hold.

    Attributes:
        cr: Compression ratio at its end.
        steps_per_cr: Steps for each unit of the compression ratio.
        hold: Steps at the end, in which the learning rate falls to 0.
    """

    cr: int
    steps_per_cr: int
    hold: int = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Retrofit to the first ratio of a scale that differs in one thing.

    Attributes:
        title: Name of the difference.
        steps: Factor on the steps of the anneal and of the hold.
        overrides: Overrides of the experiment.
        experiment: Name in `research/conf/experiment`.
        model: Retrofitted model: the teacher, or its `gqa` version.
        shorter: Factor by which its samples are shorter, with as many tokens in a step.
    """

    title: str
    steps: float = 1.0
    overrides: tuple[str, ...] = ()
    experiment: str = "lab_retrofit"
    model: str = "teacher"
    shorter: int = 1


DMS = "dms"
VARIANTS = {
    "immediate": Variant(title="immediate eviction", overrides=("method.eviction=immediate",)),
    "dmc": Variant(title="Dynamic Memory Compression", experiment="lab_dmc"),
    "dmc_4x": Variant(title="the same with 4 times the tokens", experiment="lab_dmc", steps=4),
    "steps_eighth": Variant(title="an eighth of the tokens", steps=1 / 8),
    "steps_half": Variant(title="half of the tokens", steps=1 / 2),
    "steps_4x": Variant(title="4 times the tokens", steps=4),
    "window_4": Variant(title="a window of 4 tokens", overrides=("method.window=4",)),
    "window_64": Variant(title="a window of 64 tokens", overrides=("method.window=64",)),
    "zeroing_10": Variant(title="10 steps of zeroing", overrides=("stage.zero_neuron.steps=10",)),
    "zeroing_2000": Variant(
        title="2,000 steps of zeroing", overrides=("stage.zero_neuron.steps=2000",)
    ),
    "half_context": Variant(title="samples of half the length", shorter=2),
    "gqa": Variant(title="half of the KV heads", model="gqa"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Teacher with its data, retrofits and evaluations.

    Attributes:
        experiment: Teacher's experiment in `research/conf/experiment`.
        context: Tokens of a training sample.
        micro_batch: Samples of a forward pass of the retrofit.
        numbers: Numbers in a Countdown prompt.
        learned: Numbers in the teacher's Countdown documents, drawn equally often; none for
            `numbers`. Short searches show their ends more often.
        tasks: Tasks that the teacher learns unless others are chosen.
        samples: Samples of the teacher's data, of all tasks and the validation split.
        long_samples: The same for the retrofits' data.
        packing: True if a document is one example, and samples keep their documents apart.
            Otherwise a document has the `context` tokens of a sample, from several examples, and
            most documents of the retrofits begin with a long example.
        retrofits: One after the other, each from the one before.
        methods: Methods of the retrofits; every method except DMS is the variant of its name.
        long_ratios: Compression ratios of the retrofits that are evaluated at longer contexts.
        policies: Cache policies that the teacher is evaluated with.
        budget_ratios: Compression ratios whose peak tokens the policies get as their budget.
        problems: Documents of an evaluation.
        compared_problems: The first of them, for one chain with each policy and variant.
        lengths: Generated tokens of a chain, in units of 1,024.
        jobs: Commands that fit into the memory of a GPU of 140 GB together.
        widths: Chains of a problem.
        gqa_steps: Training steps of the teacher with half of its KV heads.
        long_steps: Training steps of the teacher with four times its context.
        teacher: Further overrides of the teacher's experiment.
        retrofit: Further overrides of the retrofits' experiments.
    """

    experiment: str
    context: int
    micro_batch: int = 32
    numbers: int
    learned: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ("countdown",)
    samples: int
    long_samples: int
    packing: bool = False
    retrofits: tuple[Retrofit, ...] = (
        Retrofit(cr=4, steps_per_cr=100),
        Retrofit(cr=8, steps_per_cr=75),
        Retrofit(cr=16, steps_per_cr=40),
        Retrofit(cr=32, steps_per_cr=20),
    )
    methods: tuple[str, ...] = (DMS,)
    long_ratios: tuple[int, ...] = (4, 8)
    policies: tuple[str, ...] = ("window", "streaming_llm", "h2o", "tova", "r_kv", "quest")
    budget_ratios: tuple[int, ...] = (4, 8)
    problems: int = 400
    compared_problems: int = 400
    lengths: tuple[float, ...]
    jobs: int = 4
    widths: tuple[int, ...] = (1, 2, 4)
    gqa_steps: int = 440
    long_steps: int = 1000
    teacher: tuple[str, ...] = ()
    retrofit: tuple[str, ...] = ()


# Two of 17 searches have five numbers, and 58 % of the tokens.
_SHORT_FIRST = (3,) * 10 + (4,) * 5 + (5,) * 2
SCALES = {
    "s": Scale(
        experiment="lab_teacher_s",
        context=2048,
        numbers=4,
        samples=288_000,
        long_samples=46_000,
        lengths=(0.25, 0.5, 0.75, 1, 1.5, 2),
    ),
    "m": Scale(
        experiment="lab_teacher_m",
        context=4096,
        micro_batch=16,
        numbers=5,
        learned=_SHORT_FIRST,
        samples=59_000,
        long_samples=31_000,
        gqa_steps=480,
        long_steps=1000,
        lengths=(0.5, 1, 2, 3, 4),
        retrofit=("data.global_batch_size=16",),
    ),
    "l": Scale(
        experiment="lab_teacher_l",
        context=8192,
        micro_batch=8,
        numbers=5,
        learned=_SHORT_FIRST,
        samples=20_000,
        long_samples=9_000,
        retrofits=(Retrofit(cr=4, steps_per_cr=100), Retrofit(cr=8, steps_per_cr=75)),
        budget_ratios=(4,),
        problems=200,
        jobs=2,
        gqa_steps=400,
        long_steps=800,
        lengths=(1, 2, 4, 6, 8),
        retrofit=("data.global_batch_size=8",),
    ),
    "recall": Scale(
        experiment="lab_teacher_s",
        context=2048,
        numbers=4,
        tasks=("lab_niah", "lab_variable_tracking", "lab_linear_1d"),
        samples=164_000,
        long_samples=27_000,
        packing=True,
        retrofits=tuple(Retrofit(cr=cr, steps_per_cr=100, hold=100) for cr in (2, 3, 4)),
        methods=(DMS, "dmc"),
        long_ratios=(2, 4),
        policies=("h2o", "tova", "quest"),
        budget_ratios=(2, 3, 4),
        lengths=(1,),
        teacher=("optim.lr=7e-4", "stage.pretrain.steps=5000"),
    ),
    "toy": Scale(
        experiment="lab_teacher_s",
        context=192,
        micro_batch=4,
        numbers=4,
        samples=600,
        long_samples=600,
        retrofits=(Retrofit(cr=2, steps_per_cr=2, hold=1),),
        long_ratios=(2,),
        policies=("streaming_llm",),
        budget_ratios=(2,),
        problems=2,
        compared_problems=1,
        lengths=(1 / 64, 1 / 32),
        widths=(1, 2),
        gqa_steps=2,
        long_steps=2,
        teacher=(
            "model.architecture.num_layers=2",
            "model.architecture.hidden_size=32",
            "model.architecture.ffn_hidden_size=48",
            "model.architecture.num_attention_heads=4",
            "model.architecture.kv_channels=8",
            "data.micro_batch_size=4",
            "data.global_batch_size=4",
            "stage.pretrain.steps=4",
            "optim.lr_warmup_steps=0",
            "run.log_interval=1",
            "run.eval_samples=1",
        ),
        retrofit=(
            "data.global_batch_size=4",
            "stage.zero_neuron.steps=1",
            "stage.export.every_integer_cr=false",
            "run.check_teacher=false",  # a teacher of four steps
            "run.log_interval=1",
            "run.eval_samples=1",
        ),
    ),
}
