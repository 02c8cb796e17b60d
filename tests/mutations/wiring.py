"""Mutations that cut an option off from the code it controls."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

APP_ENGINE = "dms_train/app/engine.py"
COMPONENTS = "dms_train/app/components.py"
SCALING = "dms_train/evaluation/scaling/run.py"
TRAINING = "tests/unit/wiring/test_training.py::"
TRAINS = TRAINING + "test_an_option_acts"
EVALUATES = "tests/unit/wiring/test_evaluation.py::test_an_option_acts"
SERVES = "tests/unit/wiring/test_inference.py::test_"
STAGES = "dms_train/training/stages.py"
OPTIM = "dms_train/mcore/schedule/optimizer.py"
CONFIGURATION = "dms_train/mcore/model/configuration.py"
OPTIONS = "tests/unit/mcore/test_optimizer_options.py::"

WIRING = [
    Mutation(
        "the loss of zero_neuron is ignored",
        STAGES,
        "ZeroNeuronStage($$$HEAD, loss=$OPTIONS.loss, $$$TAIL)",
        'ZeroNeuronStage($$$HEAD, loss="distill", $$$TAIL)',
        TRAINS + "[stage.zero_neuron.loss]",
    ),
    Mutation(
        "the loss of retrofit is ignored",
        STAGES,
        "RetrofitStage($$$HEAD, loss=$OPTIONS.loss, rate=_constant($$$RATE), $$$TAIL)",
        'RetrofitStage($$$HEAD, loss="distill", rate=_constant($$$RATE), $$$TAIL)',
        TRAINS + "[stage.retrofit.loss]",
    ),
    Mutation(
        "the loss of hold is ignored",
        STAGES,
        "RetrofitStage($$$HEAD, loss=$OPTIONS.loss, rate=_cosine($$$RATE), $$$TAIL)",
        'RetrofitStage($$$HEAD, loss="distill", rate=_cosine($$$RATE), $$$TAIL)',
        TRAINS + "[stage.hold.loss]",
    ),
    Mutation(
        "a loaded student is its own teacher",
        APP_ENGINE,
        "$ENGINE.attach_teacher(None if $BEGINS else $ORIGINAL)",
        "$ENGINE.attach_teacher(None if $BEGINS else WeightReader(start.student))",
        TRAINING + "test_the_teacher_is_the_original_and_the_student_is_what_run_load_names",
    ),
    Mutation(
        "run.load forgets the ratio of an export",
        "dms_train/app/start_point.py",
        "formats.read_target_cr($STUDENT)",
        "1.0",
        TRAINING + "test_a_retrofit_continues_from_the_ratio_of_what_run_load_names[export]",
    ),
    Mutation(
        "run.load forgets the ratio of a checkpoint",
        "dms_train/app/start_point.py",
        "float($POSITION.target_cr)",
        "1.0",
        TRAINING + "test_a_retrofit_continues_from_the_ratio_of_what_run_load_names[checkpoint]",
    ),
    Mutation(
        "a retrofit starts at ratio 1 again",
        "dms_train/app/start_point.py",
        "TrainState($$$HEAD, loaded_cr=$RATIO, $$$TAIL)",
        "TrainState($$$HEAD, $$$TAIL)",
        TRAINING + "test_a_retrofit_continues_from_the_ratio_of_what_run_load_names[export]",
    ),
    Mutation(
        "DMC's reset leaves the query channels",
        "dms_train/method/dmc/attention.py",
        "range(0, $QUERY + $SIZE, $SIZE)",
        "range($QUERY, $QUERY + $SIZE, $SIZE)",
        "tests/unit/mcore/test_channel_reset.py::"
        "test_the_reset_zeroes_the_borrowed_rows_of_every_method[dmc]",
    ),
    Mutation(
        "gradients are summed in bf16",
        OPTIM,
        "DistributedDataParallelConfig($$$HEAD, grad_reduce_in_fp32=True, $$$TAIL)",
        "DistributedDataParallelConfig($$$HEAD, grad_reduce_in_fp32=False, $$$TAIL)",
        OPTIONS + "test_gradients_of_microbatches_are_summed_in_float32",
    ),
    Mutation(
        "run.seed does not reach the noise",
        APP_ENGINE,
        "TrainEngineOptions($$$HEAD, seed=$CONFIG.run.seed, $$$TAIL)",
        "TrainEngineOptions($$$HEAD, seed=1234, $$$TAIL)",
        TRAINS + "[run.seed (of the noise)]",
    ),
    Mutation(
        "run.seed does not reach the order of the data",
        "dms_train/app/samples.py",
        "$CONFIG.run.seed",
        "1234",
        TRAINS + "[run.seed (of the data)]",
    ),
    Mutation(
        "model.init_std is ignored",
        APP_ENGINE,
        "$CONFIG.model.init_std",
        "0.02",
        TRAINS + "[model.init_std]",
    ),
    Mutation(
        "the method of a run is that of the preset",
        APP_ENGINE,
        "method = $CONFIG.method.override($$$CHANNEL)",
        "from dms_train.method.spec import PRESETS\n"
        "\n"
        "method = PRESETS[$CONFIG.method.preset].override(window=$CONFIG.method.window)",
        TRAINS + "[method.tau]",
    ),
    Mutation(
        "the warm-up of the learning rate is left out",
        "dms_train/app/preparation.py",
        "build_stages($STAGES, $CONFIG.optim.lr_warmup_steps, $$$REST)",
        "build_stages($STAGES, 0, $$$REST)",
        TRAINS + "[optim.lr_warmup_steps]",
    ),
    Mutation(
        "the page size of an export is the default",
        "dms_train/app/exporter.py",
        "$EXPORT($$$HEAD, block_size=self.options.paged_attention_block_size, $$$TAIL)",
        "$EXPORT($$$HEAD, $$$TAIL)",
        TRAINS + "[stage.export.paged_attention_block_size]",
    ),
    Mutation(
        "weights of a blend are ignored",
        "dms_train/data/tokens.py",
        "$OPTIONS.weights or $TOKENS",
        "$TOKENS",
        TRAINS + "[data.weights]",
    ),
    Mutation(
        "recomputed units have one layer",
        CONFIGURATION,
        "$OPTIONS.recompute_num_layers if $FULL else None",
        "1 if $FULL else None",
        TRAINS + "[parallel.recompute_num_layers]",
    ),
    Mutation(
        "the speed of a device is not reported",
        COMPONENTS,
        "$SPEED($$$HEAD, peak_tflops=$CONFIG.observe.peak_tflops, $$$TAIL)",
        "$SPEED($$$HEAD, $$$TAIL)",
        TRAINS + "[observe.peak_tflops]",
    ),
    Mutation(
        "a run stops after another number of skipped steps",
        COMPONENTS,
        "$CONFIG.run.max_skipped_steps",
        "3",
        TRAINS + "[run.max_skipped_steps]",
    ),
    Mutation(
        "the kernels of a run are ignored",
        APP_ENGINE,
        "TrainEngineOptions($$$HEAD, kernels=$CONFIG.kernels, $$$TAIL)",
        "TrainEngineOptions($$$HEAD, $$$TAIL)",
        TRAINS + "[kernels]",
    ),
    Mutation(
        "a validation generates as many tokens as it likes",
        "dms_train/evaluation/validation.py",
        "$OPTIONS.max_tokens",
        "16",
        "tests/unit/wiring/test_evaluation.py::test_an_option_of_a_validation_acts[max_tokens]",
    ),
    Mutation(
        "top-k of an evaluation is ignored",
        SCALING,
        "$PARAMS($$$HEAD, top_k=$SAMPLING.top_k, $$$TAIL)",
        "$PARAMS($$$HEAD, $$$TAIL)",
        EVALUATES + "[sampling.top_k-by_command]",
    ),
    Mutation(
        "the stage run_tasks forgets its workers",
        "dms_train/evaluation/options.py",
        "RunFolderOptions($$$HEAD, workers=self.workers, $$$TAIL)",
        "RunFolderOptions($$$HEAD, $$$TAIL)",
        EVALUATES + "[run.workers-by_stage]",
    ),
    Mutation(
        "an evaluation has the prompt chunks of the default",
        SCALING,
        "$OPTIONS($$$HEAD, prefill_chunk=$MODEL.prefill_chunk, $$$TAIL)",
        "$OPTIONS($$$HEAD, $$$TAIL)",
        EVALUATES + "[model.prefill_chunk-by_stage]",
    ),
    Mutation(
        "the time that saving may take is not given to a job",
        "dms_train/launch/chain.py",
        "str($CLUSTER.save_seconds)",
        "str($CLUSTER.signal_seconds)",
        "tests/unit/wiring/test_cluster.py::test_an_option_acts[save_seconds]",
    ),
    Mutation(
        "the engine decodes in bursts of another length",
        "dms_train/inference/runner.py",
        "1 if $GRAPHS is None else $OPTIONS.decode_steps",
        "1 if $GRAPHS is None else 8",
        SERVES + "an_option_of_the_engine_acts[decode_steps]",
    ),
    Mutation(
        "min-p of a request is ignored",
        "dms_train/inference/options.py",
        "math.log(self.min_p) if self.min_p > 0 else -math.inf",
        "-math.inf",
        SERVES + "a_parameter_of_a_request_acts[min_p]",
    ),
]
