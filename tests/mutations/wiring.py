"""Options that do not reach the place where they act."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

APP_ENGINE = "dms_train/app/engine.py"
PARTS = "dms_train/app/components.py"
SCALING = "dms_train/evaluation/scaling/run.py"
TRAINING = "tests/unit/wiring/test_training.py::"
TRAINS = TRAINING + "test_an_option_acts"
EVALUATES = "tests/unit/wiring/test_evaluation.py::test_an_option_acts"
SERVES = "tests/unit/wiring/test_inference.py::test_"
STAGES = "dms_train/training/stages.py"
OPTIM = "dms_train/mcore/schedule/optimizer.py"
MODEL = "dms_train/mcore/model/model.py"
OPTIONS = "tests/unit/mcore/test_optimizer_options.py::"

WIRING = [
    Mutation(
        "the loss of zero_neuron is ignored",
        STAGES,
        "loss=z.loss,",
        'loss="distill",',
        TRAINS + "[stage.zero_neuron.loss]",
    ),
    Mutation(
        "the loss of retrofit is ignored",
        STAGES,
        "loss=r.loss,",
        'loss="distill",',
        TRAINS + "[stage.retrofit.loss]",
    ),
    Mutation(
        "the loss of hold is ignored",
        STAGES,
        "loss=h.loss,",
        'loss="distill",',
        TRAINS + "[stage.hold.loss]",
    ),
    Mutation(
        "a loaded student is its own teacher",
        APP_ENGINE,
        "engine.attach_teacher(original if start.student is not None else None)",
        "engine.attach_teacher(\n"
        "            WeightReader(start.student) if start.student is not None else None\n"
        "        )",
        TRAINING + "test_the_teacher_is_the_original_and_the_student_is_what_run_load_names",
    ),
    Mutation(
        "run.load forgets the ratio of an export",
        "dms_train/app/start_point.py",
        "ratio = formats.read_target_cr(student)",
        "ratio = 1.0",
        TRAINING + "test_a_retrofit_continues_from_the_ratio_of_what_run_load_names[export]",
    ),
    Mutation(
        "run.load forgets the ratio of a checkpoint",
        "dms_train/app/start_point.py",
        "ratio = float(position.target_cr)",
        "ratio = 1.0",
        TRAINING + "test_a_retrofit_continues_from_the_ratio_of_what_run_load_names[checkpoint]",
    ),
    Mutation(
        "a retrofit starts at ratio 1 again",
        "dms_train/app/start_point.py",
        "loaded_cr=ratio, target_cr=ratio",
        "target_cr=ratio",
        TRAINING + "test_a_retrofit_continues_from_the_ratio_of_what_run_load_names[export]",
    ),
    Mutation(
        "DMC's reset leaves the query channels",
        "dms_train/method/dmc/attention.py",
        "for first in range(0, query + size, size)",
        "for first in range(query, query + size, size)",
        "tests/unit/mcore/test_channel_reset.py::"
        "test_the_reset_zeroes_the_borrowed_rows_of_every_method[dmc]",
    ),
    Mutation(
        "gradients are summed in bf16",
        OPTIM,
        "grad_reduce_in_fp32=True",
        "grad_reduce_in_fp32=False",
        OPTIONS + "test_gradients_of_microbatches_are_summed_in_float32",
    ),
    Mutation(
        "run.seed does not reach the noise",
        APP_ENGINE,
        "seed=config.run.seed,",
        "seed=1234,",
        TRAINS + "[run.seed (of the noise)]",
    ),
    Mutation(
        "run.seed does not reach the order of the data",
        "dms_train/app/samples.py",
        "seed=config.run.seed,",
        "seed=1234,",
        TRAINS + "[run.seed (of the data)]",
    ),
    Mutation(
        "model.init_std is ignored",
        APP_ENGINE,
        "config.model.init_std)",
        "0.02)",
        TRAINS + "[model.init_std]",
    ),
    Mutation(
        "the method of a run is that of the preset",
        APP_ENGINE,
        "    engine = McoreEngine(prepared.architecture, config.method, view, options, source)",
        "    from dms_train.method.spec import PRESETS\n\n"
        "    method = PRESETS[config.method.preset].override(window=config.method.window)\n"
        "    engine = McoreEngine(prepared.architecture, method, view, options, source)",
        TRAINS + "[method.tau]",
    ),
    Mutation(
        "the warm-up of the learning rate is left out",
        "dms_train/app/preparation.py",
        "config.optim.lr_warmup_steps",
        "0",
        TRAINS + "[optim.lr_warmup_steps]",
    ),
    Mutation(
        "the page size of an export is the default",
        "dms_train/app/exporter.py",
        "                block_size=self.options.paged_attention_block_size,\n"
        "                provenance",
        "                provenance",
        TRAINS + "[stage.export.paged_attention_block_size]",
    ),
    Mutation(
        "weights of a blend are ignored",
        "dms_train/data/tokens.py",
        "for weight in options.weights or tokens]",
        "for weight in tokens]",
        TRAINS + "[data.weights]",
    ),
    Mutation(
        "recomputed units have one layer",
        MODEL,
        "recompute_num_layers=options.recompute_num_layers if full else None",
        "recompute_num_layers=1 if full else None",
        TRAINS + "[parallel.recompute_num_layers]",
    ),
    Mutation(
        "the speed of a device is not reported",
        PARTS,
        "            peak_tflops=config.observe.peak_tflops,\n",
        "",
        TRAINS + "[observe.peak_tflops]",
    ),
    Mutation(
        "a run stops after another number of skipped steps",
        PARTS,
        "max_consecutive=config.run.max_skipped_steps",
        "max_consecutive=3",
        TRAINS + "[run.max_skipped_steps]",
    ),
    Mutation(
        "the kernels of a run are ignored",
        APP_ENGINE,
        "        kernels=config.kernels,\n",
        "",
        TRAINS + "[kernels]",
    ),
    Mutation(
        "a validation generates as many tokens as it likes",
        "dms_train/evaluation/validation.py",
        "max_tokens=options.max_tokens",
        "max_tokens=16",
        "tests/unit/wiring/test_evaluation.py::test_an_option_of_a_validation_acts[max_tokens]",
    ),
    Mutation(
        "top-k of an evaluation is ignored",
        SCALING,
        "        top_k=sampling.top_k,\n",
        "",
        EVALUATES + "[sampling.top_k-by_command]",
    ),
    Mutation(
        "the stage run_tasks forgets its workers",
        "dms_train/evaluation/options.py",
        "workers=self.workers, ",
        "",
        EVALUATES + "[run.workers-by_stage]",
    ),
    Mutation(
        "an evaluation has the prompt chunks of the default",
        SCALING,
        "        prefill_chunk=model.prefill_chunk,\n",
        "",
        EVALUATES + "[model.prefill_chunk-by_stage]",
    ),
    Mutation(
        "the time that saving may take is not given to a job",
        "dms_train/launch/chain.py",
        "str(cluster.save_seconds)",
        "str(cluster.signal_seconds)",
        "tests/unit/wiring/test_cluster.py::test_an_option_acts[save_seconds]",
    ),
    Mutation(
        "the engine takes groups of another length",
        "dms_train/inference/runner.py",
        "else options.decode_steps",
        "else 8",
        SERVES + "an_option_of_the_engine_acts[decode_steps]",
    ),
    Mutation(
        "min-p of a request is ignored",
        "dms_train/inference/options.py",
        "return math.log(self.min_p) if self.min_p > 0 else -math.inf",
        "return -math.inf",
        SERVES + "a_parameter_of_a_request_acts[min_p]",
    ),
]
