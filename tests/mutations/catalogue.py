"""Known mistakes, each with the test that must fail."""

from __future__ import annotations

from tests.mutations.mutation import Mutation
from tests.mutations.wiring import WIRING

ENGINE = "dms_train/mcore/engine.py"
STEP = "dms_train/mcore/schedule/step.py"
CONFIGURATION = "dms_train/mcore/model/configuration.py"
MODEL = "dms_train/mcore/model/model.py"
CHANNEL = "dms_train/mcore/model/eviction_channel.py"
TOKEN_LOSSES = "dms_train/method/token_losses.py"
OPTIM = "dms_train/mcore/schedule/optimizer.py"
COMPAT = "dms_train/mcore/compat.py"
ATTENTION = "dms_train/mcore/layers/attention.py"
STAGES = "dms_train/training/stages.py"
ADAPTER = "dms_train/hf/adapter.py"
POLICY = "dms_train/inference/policies/dms.py"

ONE_STEP = "tests/unit/mcore/test_one_step.py::"
PLAIN = ONE_STEP + "test_one_step_is_the_plain_objective"
PACKED = "tests/unit/mcore/test_packing.py::"
DOCUMENTS = PACKED + "test_a_packed_step_is_the_plain_objective_of_documents_alone"
OPTIONS = "tests/unit/mcore/test_optimizer_options.py::"
ADAMW = OPTIONS + "test_weights_move_as_adamw_with_this_option_moves_them"
LOADED = "tests/unit/mcore/test_loaded_weights.py::"
TINY_STEP = LOADED + "test_a_step_at_a_tiny_learning_rate_moves_loaded_weights_by_no_more"
RESET = "tests/distributed/test_channel_reset.py::"
ROWS = RESET + "test_the_channels_rows_are_zero_and_all_others_as_before"
OWN_RATE = "tests/unit/training/test_stages.py::"
RATES = OWN_RATE + "test_a_learning_rate_of_its_own_holds_for_that_stage_alone"
ADAPTERS = "tests/unit/mcore/test_adapter_export.py::"

MUTATIONS = [
    # The objective
    Mutation(
        "the teacher forgets RoPE scaling",
        ENGINE,
        "$TEACHERS = self._build_chunks($METHOD, $SOURCE, ALL_WEIGHTS)",
        "import dataclasses\n"
        "\n"
        "whole = self.architecture\n"
        "self.architecture = dataclasses.replace(whole, rope_scaling=None)\n"
        "$TEACHERS = self._build_chunks($METHOD, $SOURCE, ALL_WEIGHTS)\n"
        "self.architecture = whole",
        ONE_STEP + "test_an_untouched_student_does_not_differ_from_a_teacher_of_its_weights",
        inside="attach_teacher",
    ),
    Mutation(
        "RoPE scaling is forgotten everywhere",
        CONFIGURATION,
        '{"rope_scaling": True, "rope_scaling_factor": $FACTOR}',
        "{}",
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "the teacher evicts too",
        ENGINE,
        "MethodState($$$ARGUMENTS)",
        "self._method",
        PLAIN + "[zeroing]",
        inside="attach_teacher",
    ),
    Mutation(
        "the compression loss has weight 0.5",
        STEP,
        "($TOKENS + $COMPRESSION) / $CONTEXT.share",
        "($TOKENS + 0.5 * $COMPRESSION) / $CONTEXT.share",
        ONE_STEP + "test_without_loss_positions_the_gradient_is_that_of_the_compression_loss",
    ),
    Mutation(
        "the target ratio is ignored",
        ATTENTION,
        "evicted_fraction($PLAN.target_cr)",
        "evicted_fraction(8.0)",
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "every step draws the same noise",
        STEP,
        "sample_keys($CONTEXT.seed, $CONTEXT.step, $SAMPLES)",
        "sample_keys($CONTEXT.seed, 0, $SAMPLES)",
        ONE_STEP + "test_each_step_and_sample_draws_its_own_noise",
    ),
    Mutation(
        "every run draws the same noise",
        STEP,
        "sample_keys($CONTEXT.seed, $CONTEXT.step, $SAMPLES)",
        "sample_keys(0, $CONTEXT.step, $SAMPLES)",
        PLAIN + "[cr8_step3]",
    ),
    Mutation(
        "every layer draws the same noise",
        ATTENTION,
        "LayerNoise($KEYS, self.layer_number, $HEAD)",
        "LayerNoise($KEYS, 1, $HEAD)",
        PLAIN + "[cr8_step3]",
    ),
    Mutation(
        "loss tokens count twice with several microbatches",
        STEP,
        "len($BATCHES) * $VIEW.dp_size / $COUNT.clamp(min=1.0)",
        "len($BATCHES) * $VIEW.dp_size / ($COUNT * min(2, len($BATCHES))).clamp(min=1.0)",
        ONE_STEP + "test_the_scale_is_microbatches_over_loss_positions",
    ),
    Mutation(
        "each microbatch weighs the same whatever its mask",
        STEP,
        "($LOSSES.float() * $MASK.t()).sum() * $CONTEXT.token_scale",
        "($LOSSES.float() * $MASK.t()).sum() / $MASK.sum().clamp(min=1)",
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "the configured direction of the KL is ignored",
        TOKEN_LOSSES,
        "$LOSSES.divergence($OPTIONS.kl_direction, $OPTIONS.kl_temperature)",
        '$LOSSES.divergence("teacher_student", $OPTIONS.kl_temperature)',
        PLAIN + "[reverse_kl]",
    ),
    Mutation(
        "the KL is called with student and teacher exchanged",
        "dms_train/mcore/layers/vocabulary_losses.py",
        "$P, $Q = $DIVERGENCE.ordered($STUDENT, $TEACHER)",
        "$Q, $P = $DIVERGENCE.ordered($STUDENT, $TEACHER)",
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "the temperature of the KL is ignored",
        TOKEN_LOSSES,
        "$LOSSES.divergence($OPTIONS.kl_direction, $OPTIONS.kl_temperature)",
        "$LOSSES.divergence($OPTIONS.kl_direction, 1.0)",
        PLAIN + "[warm_kl]",
    ),
    # Loading
    Mutation(
        "fp32 copies stay as built after a checkpoint's weights are loaded",
        ENGINE,
        "self._optimizer.reload_model_params()",
        "pass",
        TINY_STEP + "[from_checkpoint-bf16]",
        inside="load",
    ),
    Mutation(
        "a loaded checkpoint gives the rounded weights to the optimizer",
        ENGINE,
        "checkpoint.load_masters($$$ARGUMENTS)",
        "pass",
        LOADED + "test_a_loaded_checkpoint_gives_its_fp32_weights[llama-all-True]",
    ),
    Mutation(
        "choosing a channel rounds the fp32 weights of a loaded checkpoint",
        ENGINE,
        "self._optimizer is not None and self._options.trainable.adapts",
        "self._optimizer is not None",
        LOADED + "test_a_loaded_checkpoint_gives_its_fp32_weights[llama-all-True]",
    ),
    Mutation(
        "fp32 copies stay as built after an export's weights are loaded",
        ENGINE,
        "if self._optimizer is not None:\n    self._optimizer.reload_model_params()",
        "pass",
        TINY_STEP + "[from_export-bf16]",
        inside="load_hf",
    ),
    Mutation(
        "a shared teacher keeps the adapters of the student",
        "dms_train/mcore/model/sharing.py",
        "$PROJECTION.active = $METHOD is not self._method",
        "$PROJECTION.active = True",
        "tests/unit/mcore/test_trainable.py::test_a_shared_teacher_equals_a_separate_one[None-lora]",
    ),
    # Resetting the eviction channel
    Mutation(
        "the reset ignores where a data rank's part begins",
        COMPAT,
        "for $ROW in $ROWS:\n"
        "    $FIRST = min(max($ROW * $WIDTH, $SHARD.start), $SHARD.end) - $SHARD.start\n"
        "    $LAST = min(max(($ROW + 1) * $WIDTH, $SHARD.start), $SHARD.end) - $SHARD.start\n"
        "    $RESET",
        "for $ROW in $ROWS:\n    $FIRST, $LAST = $ROW * $WIDTH, ($ROW + 1) * $WIDTH\n    $RESET",
        ROWS + "[dp3-qwen2-dms-fp32-exp_avg]",
    ),
    Mutation(
        "the reset forgets the moments",
        COMPAT,
        'for $NAME in ("param", "exp_avg", "exp_avg_sq"):\n    $$$BODY',
        'for $NAME in ("param",):\n    $$$BODY',
        ROWS + "[tp2-qwen3-dms_fastdms-bf16-exp_avg]",
    ),
    Mutation(
        "the reset forgets the fp32 copies",
        COMPAT,
        'for $NAME in ("param", "exp_avg", "exp_avg_sq"):\n    $$$BODY',
        'for $NAME in ("exp_avg", "exp_avg_sq"):\n    $$$BODY',
        ROWS + "[tp2-qwen3-dms_fastdms-bf16-param]",
    ),
    Mutation(
        "half of the channels are reset under tensor parallelism",
        CHANNEL,
        "$ARCHITECTURE.num_query_groups // $VIEW.tp_size",
        "$ARCHITECTURE.num_query_groups // $VIEW.tp_size**2",
        ROWS + "[tp2-qwen2-dms-fp32-weight]",
    ),
    Mutation(
        "the reset forgets the bias",
        CHANNEL,
        "for $PARAMETER in ($PROJECTION.weight, $PROJECTION.bias):\n    $$$BODY",
        "for $PARAMETER in ($PROJECTION.weight,):\n    $$$BODY",
        ROWS + "[tp2-qwen2-dms-fp32-weight]",
    ),
    # The optimizer
    Mutation(
        "clip_grad is not passed on",
        OPTIM,
        "OptimizerConfig($$$HEAD, clip_grad=$OPTIONS.clip_grad, $$$TAIL)",
        "OptimizerConfig($$$HEAD, $$$TAIL)",
        ADAMW + "[clip_grad]",
    ),
    Mutation(
        "adam_beta1 is not passed on",
        OPTIM,
        "OptimizerConfig($$$HEAD, adam_beta1=$OPTIONS.adam_beta1, $$$TAIL)",
        "OptimizerConfig($$$HEAD, $$$TAIL)",
        ADAMW + "[adam_beta1]",
    ),
    Mutation(
        "adam_beta2 is not passed on",
        OPTIM,
        "OptimizerConfig($$$HEAD, adam_beta2=$OPTIONS.adam_beta2, $$$TAIL)",
        "OptimizerConfig($$$HEAD, $$$TAIL)",
        ADAMW + "[adam_beta2]",
    ),
    Mutation(
        "adam_eps is not passed on",
        OPTIM,
        "OptimizerConfig($$$HEAD, adam_eps=$OPTIONS.adam_eps, $$$TAIL)",
        "OptimizerConfig($$$HEAD, $$$TAIL)",
        ADAMW + "[adam_eps]",
    ),
    Mutation(
        "weight_decay is not passed on",
        ENGINE,
        "$OPTIONS.optim.weight_decay",
        "0.01",
        ADAMW + "[weight_decay]",
    ),
    Mutation(
        "a run's optimizer options do not reach its engine",
        "dms_train/app/engine.py",
        "TrainEngineOptions($$$HEAD, optim=$CONFIG.optim, $$$TAIL)",
        "TrainEngineOptions($$$HEAD, optim=type($CONFIG.optim)(lr=$CONFIG.optim.lr), $$$TAIL)",
        OPTIONS + "test_the_configuration_of_a_run_is_what_the_optimizer_runs_with",
    ),
    Mutation(
        "a stage's learning rate does not reach the optimizer",
        OPTIM,
        '$GROUP["max_lr"], $GROUP["min_lr"] = $LIMITS',
        '$GROUP["max_lr"] = $GROUP["min_lr"] = 1e-3',
        ADAMW + "[none]",
    ),
    Mutation(
        "pretrain ignores its own learning rate",
        STAGES,
        'if $NAME == "pretrain":\n'
        "    $OPTIONS = $STAGE.pretrain\n"
        "    $RATE = _cosine($OWN, $$$REST)\n"
        "    $$$TAIL",
        'if $NAME == "pretrain":\n'
        "    $OPTIONS = $STAGE.pretrain\n"
        "    $RATE = _cosine(1e-4, $$$REST)\n"
        "    $$$TAIL",
        RATES,
    ),
    Mutation(
        "zero_neuron ignores its own learning rate",
        STAGES,
        'if $NAME == "zero_neuron":\n'
        "    $OPTIONS = $STAGE.zero_neuron\n"
        "    $RATE = _constant($OWN, $$$REST)\n"
        "    $$$TAIL",
        'if $NAME == "zero_neuron":\n'
        "    $OPTIONS = $STAGE.zero_neuron\n"
        "    $RATE = _constant(1e-4, $$$REST)\n"
        "    $$$TAIL",
        RATES,
    ),
    Mutation(
        "retrofit ignores its own learning rate",
        STAGES,
        "RetrofitStage($$$HEAD, rate=_constant($OWN, $$$REST), $$$TAIL)",
        "RetrofitStage($$$HEAD, rate=_constant(1e-4, $$$REST), $$$TAIL)",
        RATES,
    ),
    Mutation(
        "hold ignores its own learning rate",
        STAGES,
        "RetrofitStage($$$HEAD, rate=_cosine($OWN, $$$REST), $$$TAIL)",
        "RetrofitStage($$$HEAD, rate=_cosine(1e-4, $$$REST), $$$TAIL)",
        RATES,
    ),
    Mutation(
        "a stage's own learning rate is replaced by the common one",
        "dms_train/config/resolve.py",
        "{$NAME: $VALUE for $NAME, $STAGE in $STAGES.items() if $STAGE.lr is None}",
        "{$NAME: $VALUE for $NAME, $STAGE in $STAGES.items()}",
        "tests/unit/config/test_resolve.py::test_a_stage_keeps_a_learning_rate_of_its_own",
    ),
    # Method, kernels, inference
    Mutation(
        "the window is one token shorter",
        "dms_train/method/visibility.py",
        "$QUERIES[:, None] - $KEYS[None, :] > $WINDOW",
        "$QUERIES[:, None] - $KEYS[None, :] >= $WINDOW",
        "tests/unit/method/test_visibility.py::test_rule_equals_its_description",
    ),
    Mutation(
        "the decision shift is ignored",
        "dms_train/method/dms/spec.py",
        "return self.decision_shift + $WINDOW",
        "return 0 + $WINDOW",
        "tests/unit/method/test_visibility.py::test_rule_equals_its_description",
    ),
    Mutation(
        "the temperature of the relaxation is ignored",
        "dms_train/method/decisions.py",
        "($LOGITS if $NOISE is None else $LOGITS + $NOISE) / $TAU",
        "$LOGITS if $NOISE is None else $LOGITS + $NOISE",
        PLAIN + "[cr8_step3]",
    ),
    Mutation(
        "the window of the CPU kernel is one token shorter",
        "dms_train/kernels/train_attention/blockwise.py",
        "torch.where($DISTANCE > $WINDOW, $$$VALUES)",
        "torch.where($DISTANCE >= $WINDOW, $$$VALUES)",
        "tests/unit/kernels/test_blockwise.py::test_output_and_gradients_equal_the_reference",
    ),
    Mutation(
        "the backward pass of the CPU kernel has another window",
        "dms_train/kernels/train_attention/blockwise.py",
        "_distance($$$RANGE) > $WINDOW",
        "_distance($$$RANGE) >= $WINDOW",
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "the window of the GPU kernel is one token shorter",
        "dms_train/kernels/train_attention/triton_forward.py",
        "tl.where($DISTANCE > $WINDOW, $BIAS[None, :], 0.0)",
        "tl.where($DISTANCE >= $WINDOW, $BIAS[None, :], 0.0)",
        "tests/unit/kernels/test_triton_train.py::test_output_and_gradients_equal_float64",
    ),
    Mutation(
        "the GPU kernel of the decisions ignores the offset",
        "dms_train/kernels/layers/triton_decide.py",
        "$SCALE * $CHANNEL - $OFFSET",
        "$SCALE * $CHANNEL",
        "tests/unit/kernels/test_triton_eviction_channel.py::test_decisions_and_their_cost[37-dms-delayed-plain]",
    ),
    Mutation(
        "the cache lets tokens go one token early",
        POLICY,
        "$QUERY[:, None, :, None] - $SLOTS.position[:, :, None, :] > self.window",
        "$QUERY[:, None, :, None] - $SLOTS.position[:, :, None, :] >= self.window",
        "tests/unit/inference/test_cache.py::test_equals_the_visibility_rule[0.5-delayed-1-6chunks-compact]",
    ),
    Mutation(
        "the cache ignores the decision shift",
        POLICY,
        "$SLOTS.position + shift - $BASE",
        "$SLOTS.position - $BASE",
        "tests/unit/inference/test_cache.py::test_equals_the_visibility_rule[0.5-delayed-1-6chunks-compact]",
    ),
    Mutation(
        "the cache of pages lets tokens go one token early",
        POLICY,
        "WindowRule($$$HEAD, window=self.window, $$$TAIL)",
        "WindowRule($$$HEAD, window=self.window - 1, $$$TAIL)",
        "tests/unit/inference/test_paged.py::test_equals_the_visibility_rule[8chunks-1-delayed]",
    ),
    Mutation(
        "generation leaves the eviction channel in the query",
        "dms_train/inference/cache/interface.py",
        "$QUERY, $KEY = $METHOD.cleared($QUERY, $KEY)",
        "pass",
        "tests/unit/inference/test_parity.py::test_same_text_same_logits[llama-dms-7]",
    ),
    Mutation(
        "the sampling temperature is ignored",
        "dms_train/inference/sampler.py",
        "$SCORES.double() / $TEMPERATURE[:, None].to($DEVICE)",
        "$SCORES.double()",
        "tests/unit/inference/test_sampler.py::test_draws_follow_the_softmax_over_the_temperature",
    ),
    Mutation(
        "top-p leaves one token less",
        "dms_train/inference/sampler.py",
        "$WEIGHT.cumsum(-1) - $WEIGHT >= $LEAST",
        "$WEIGHT.cumsum(-1) >= $LEAST",
        "tests/unit/inference/test_sampler.py::test_tokens_are_drawn_from_what_loops_leave",
    ),
    Mutation(
        "of equal logits the kernel leaves the last ones",
        "dms_train/kernels/layers/triton_rank.py",
        "(1 << TOKEN_BITS) - 1 - $TOKEN",
        "$TOKEN",
        "tests/unit/kernels/test_restrict.py::test_of_equal_logits_the_first_are_left",
    ),
    Mutation(
        "exported code has a window one token shorter",
        "dms_train/export/shipped/modeling_dms.py",
        "$QUERIES[:, None] - $KEYS[None, :] > $NUMBERS.window",
        "$QUERIES[:, None] - $KEYS[None, :] >= $NUMBERS.window",
        "tests/unit/hf/test_modeling.py::test_equals_independent_forward[llama-dms]",
    ),
    # Packing
    Mutation(
        "a decision governs a key of the document before",
        "dms_train/method/visibility.py",
        "$POSITIONS + $SHIFT < $DOCUMENTS.end",
        "$POSITIONS + $SHIFT < torch.full_like($DOCUMENTS.end, len($POSITIONS))",
        "tests/unit/method/test_documents.py::test_decisions_and_slots_are_those_of_documents_alone",
    ),
    Mutation(
        "packed documents attend to each other",
        ATTENTION,
        "None if self.documents is None else self.documents.cu_seqlens",
        "None",
        DOCUMENTS + "[cr8_step3]",
    ),
    Mutation(
        "positions run on over the documents of a sample",
        ATTENTION,
        "None if $DOCUMENTS is None else $DOCUMENTS.positions.t().contiguous()",
        "None",
        DOCUMENTS + "[nvidia]",
    ),
    Mutation(
        "the teacher does not see where documents end",
        MODEL,
        "$TEACHER.run_layers($HIDDEN, $STATS, None, $DOCUMENTS)",
        "$TEACHER.run_layers($HIDDEN, $STATS, None)",
        DOCUMENTS + "[zeroing]",
    ),
    Mutation(
        "layers with targets of their own all have that of the mean",
        ATTENTION,
        "self.target * $WEIGHTS[$LAYER]",
        "self.target",
        PLAIN + "[layer_targets]",
    ),
    Mutation(
        "layers with targets of their own owe that of the mean too",
        ATTENTION,
        "-1.0 if self.plan.layer_weights else self.target",
        "self.target",
        PLAIN + "[layer_targets]",
    ),
    Mutation(
        "an offloaded layer reads its slot before the copy",
        "dms_train/mcore/model/offload.py",
        "slot.copy_($HOST.flat)",
        "None",
        "tests/unit/mcore/test_teacher.py::"
        "test_an_offloaded_teacher_computes_the_same_with_two_layers_at_a_time[None]",
    ),
    Mutation(
        "padding counts in the mean decision",
        "dms_train/method/dms/attention.py",
        "$COUNTED * $DOCUMENTS.is_token.t()[..., None]",
        "$COUNTED * 1",
        DOCUMENTS + "[cr8_step3]",
    ),
    Mutation(
        "the GPU kernel of the decisions reaches into the document before",
        "dms_train/kernels/layers/triton_decide.py",
        "$INSIDE & ($TOKEN >= $FIRST + SHIFT)",
        "$INSIDE & ($TOKEN >= SHIFT)",
        "tests/unit/kernels/test_triton_eviction_channel.py::test_decisions_stay_within_their_document[37-dms-delayed-plain]",
        inside="decide_eviction",
    ),
    Mutation(
        "the loss mask of a packed document is that of its inputs",
        "dms_train/data/packed_dataset.py",
        "self._masks.get($$$PLACE)[1:]",
        "self._masks.get($$$PLACE)[:-1]",
        "tests/unit/data/test_packing.py::test_samples_hold_the_documents_of_their_split_with_their_mask[True]",
    ),
    # The start and the end of an annealing
    Mutation(
        "the check of the teacher measures the student",
        "dms_train/mcore/layers/vocabulary_losses.py",
        "next_token_loss($TEACHER, $$$REST)",
        "next_token_loss(self.student, $$$REST)",
        "tests/unit/wiring/test_teacher_check.py::"
        "test_the_teacher_is_measured_and_not_the_student[lora]",
        inside="teacher_cross_entropy",
    ),
    Mutation(
        "an early stop keeps the weights of the ratio above the limit",
        "dms_train/training/loop.py",
        "components.engine.load(saver.step_path(state.kept_step), with_optimizer=True)",
        "components.saver.engine.load(saver.step_path(state.step), with_optimizer=True)",
        "tests/unit/training/test_kl_limit.py::"
        "test_the_run_holds_and_exports_the_last_ratio_within_the_limit",
        inside="_return_to_kept",
    ),
    # Context parallelism
    Mutation(
        "context-parallel ranks draw the noise of the first of them",
        ATTENTION,
        "$TP.rank() * $CP.size() + $CP.rank()",
        "$TP.rank() * $CP.size()",
        "tests/distributed/test_convert.py::test_every_layout_relaxes_with_the_same_noise[tp2_cp2]",
    ),
    Mutation(
        "every context-parallel rank takes the first positions",
        "dms_train/mcore/groups.py",
        "$X.chunk(self.cp_size, 1)[self.cp_rank]",
        "$X.chunk(self.cp_size, 1)[0]",
        "tests/distributed/test_parity.py::test_layout_equals_one_process[llama-dms-cp2-packed]",
    ),
    # Gemma 3
    Mutation(
        "the softmax scale of config.json is ignored",
        ATTENTION,
        "softmax_scale or $DEFAULT",
        "$DEFAULT",
        PLAIN + "[sandwich]",
    ),
    Mutation(
        "embeddings are not scaled",
        MODEL,
        "$EMBEDDED * self._embedding_scale if self._embedding_scale != 1 else $EMBEDDED",
        "$EMBEDDED",
        PLAIN + "[sandwich]",
    ),
    Mutation(
        "norms multiply by their weight alone",
        CONFIGURATION,
        "$ARCHITECTURE.described.centered_norms",
        "False",
        PLAIN + "[sandwich]",
    ),
    # Adapters beside their base model
    Mutation(
        "a merged adapter forgets its scale",
        ADAPTER,
        "$FROZEN + self._scale * $PRODUCT",
        "$FROZEN + $PRODUCT",
        ADAPTERS + "test_base_and_adapter_are_the_merged_export[biases]",
    ),
    Mutation(
        "an adapter takes any base model",
        ADAPTER,
        "$HASH != self._rows_hash",
        "False",
        ADAPTERS + "test_a_wrong_or_missing_base_is_refused_in_one_line",
    ),
    Mutation(
        "an adapter changes the base model without the rounding of the training",
        ADAPTER,
        "$BASE.to(self._trained).float()",
        "$BASE.float()",
        ADAPTERS + "test_an_adapter_in_float32_of_a_run_in_bf16_has_the_rounded_base",
    ),
    # The scheduler
    Mutation(
        "the first sequence after another one is preempted for it",
        "dms_train/inference/scheduler.py",
        "$IDLE or max($AFTER, key=$ORDER, default=None)",
        "$IDLE or min($AFTER, key=$ORDER, default=None)",
        "tests/unit/inference/test_scheduler.py::"
        "test_the_most_recent_sequence_is_preempted_for_the_first",
    ),
    *WIRING,
]
