"""Mistakes that a test must notice: a text, what replaces it, and the test that must fail."""

from __future__ import annotations

from tests.mutations.mutation import Mutation
from tests.mutations.wiring import WIRING

ENGINE = "dms_train/mcore/engine.py"
STEP = "dms_train/mcore/schedule/step.py"
MODEL = "dms_train/mcore/model/model.py"
TOKEN_LOSSES = "dms_train/method/token_losses.py"
OPTIM = "dms_train/mcore/schedule/optimizer.py"
COMPAT = "dms_train/mcore/compat.py"
ATTENTION = "dms_train/mcore/layers/attention.py"
STAGES = "dms_train/training/stages.py"
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

MUTATIONS = [
    # The objective
    Mutation(
        "the teacher forgets RoPE scaling",
        ENGINE,
        "        teachers = self._build_chunks(method, source)\n",
        "        import dataclasses\n\n"
        "        whole = self.architecture\n"
        "        self.architecture = dataclasses.replace(whole, rope_scaling=None)\n"
        "        teachers = self._build_chunks(method, source)\n"
        "        self.architecture = whole\n",
        ONE_STEP + "test_an_untouched_student_does_not_differ_from_a_teacher_of_its_weights",
    ),
    Mutation(
        "RoPE scaling is forgotten everywhere",
        MODEL,
        '    return {"rope_scaling": True, "rope_scaling_factor": scaling.factor}\n',
        "    return {}\n",
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "the teacher evicts too",
        ENGINE,
        "        method = MethodState(self._method.options, self._attend, fused_on=fused_on)\n"
        "        teachers",
        "        method = self._method\n        teachers",
        PLAIN + "[zeroing]",
    ),
    Mutation(
        "the compression loss has weight 0.5",
        STEP,
        "return (token_loss + aux_loss) / context.share, ",
        "return (token_loss + 0.5 * aux_loss) / context.share, ",
        ONE_STEP + "test_without_loss_positions_the_gradient_is_that_of_the_compression_loss",
    ),
    Mutation(
        "the target ratio is ignored",
        ATTENTION,
        '"target": evicted_fraction(plan.target_cr)',
        '"target": evicted_fraction(8.0)',
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "every step draws the same noise",
        STEP,
        "sample_keys(context.seed, context.step, batch.samples)",
        "sample_keys(context.seed, 0, batch.samples)",
        ONE_STEP + "test_each_step_and_sample_draws_its_own_noise",
    ),
    Mutation(
        "every run draws the same noise",
        STEP,
        "sample_keys(context.seed, context.step, batch.samples)",
        "sample_keys(0, context.step, batch.samples)",
        PLAIN + "[cr8_step3]",
    ),
    Mutation(
        "every layer draws the same noise",
        ATTENTION,
        "LayerNoise(self.noise_keys, self.layer_number, first_head)",
        "LayerNoise(self.noise_keys, 1, first_head)",
        PLAIN + "[cr8_step3]",
    ),
    Mutation(
        "loss tokens count twice with several microbatches",
        STEP,
        "    return len(batches) * view.dp_size / count.clamp(min=1.0)\n",
        "    count = count * min(2, len(batches))\n"
        "    return len(batches) * view.dp_size / count.clamp(min=1.0)\n",
        ONE_STEP + "test_the_scale_is_microbatches_over_loss_positions",
    ),
    Mutation(
        "each microbatch weighs the same whatever its mask",
        STEP,
        "(per_token.float() * batch.loss_mask.t()).sum() * context.token_scale",
        "(per_token.float() * batch.loss_mask.t()).sum() / batch.loss_mask.sum().clamp(min=1)",
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "the configured direction of the KL is ignored",
        TOKEN_LOSSES,
        "losses.divergence(o.kl_direction, o.kl_temperature)",
        'losses.divergence("teacher_student", o.kl_temperature)',
        PLAIN + "[reverse_kl]",
    ),
    Mutation(
        "the KL is called with student and teacher exchanged",
        "dms_train/mcore/layers/vocabulary_losses.py",
        "p, q = divergence.ordered(logits, hidden[c] @ weight.t())",
        "q, p = divergence.ordered(logits, hidden[c] @ weight.t())",
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "the temperature of the KL is ignored",
        TOKEN_LOSSES,
        "losses.divergence(o.kl_direction, o.kl_temperature)",
        "losses.divergence(o.kl_direction, 1.0)",
        PLAIN + "[warm_kl]",
    ),
    # Loading
    Mutation(
        "fp32 copies stay as built after a checkpoint's weights are loaded",
        ENGINE,
        "        if self._optimizer is not None and not with_optimizer:\n"
        "            self._optimizer.reload_model_params()\n",
        "",
        TINY_STEP + "[from_checkpoint-bf16]",
    ),
    Mutation(
        "fp32 copies stay as built after an export's weights are loaded",
        ENGINE,
        "        weights.load(self._models, source, self.architecture, self.view)\n"
        "        if self._optimizer is not None:\n"
        "            self._optimizer.reload_model_params()\n",
        "        weights.load(self._models, source, self.architecture, self.view)\n",
        TINY_STEP + "[from_export-bf16]",
    ),
    # Resetting the eviction channel
    Mutation(
        "the reset ignores where a data rank's part begins",
        COMPAT,
        "                first = min(max(row * width, shard.start), shard.end) - shard.start\n"
        "                last = min(max((row + 1) * width, shard.start), shard.end)"
        " - shard.start\n",
        "                first, last = row * width, (row + 1) * width\n",
        ROWS + "[dp3-qwen2-dms-fp32-exp_avg]",
    ),
    Mutation(
        "the reset forgets the moments",
        COMPAT,
        'for name in ("param", "exp_avg", "exp_avg_sq"):\n            for row',
        'for name in ("param",):\n            for row',
        ROWS + "[tp2-qwen3-dms_fastdms-bf16-exp_avg]",
    ),
    Mutation(
        "the reset forgets the fp32 copies",
        COMPAT,
        'for name in ("param", "exp_avg", "exp_avg_sq"):\n            for row',
        'for name in ("exp_avg", "exp_avg_sq"):\n            for row',
        ROWS + "[tp2-qwen3-dms_fastdms-bf16-param]",
    ),
    Mutation(
        "half of the channels are reset under tensor parallelism",
        ENGINE,
        "groups = self.architecture.num_query_groups // self.view.tp_size\n",
        "groups = self.architecture.num_query_groups // self.view.tp_size**2\n",
        ROWS + "[tp2-qwen2-dms-fp32-weight]",
    ),
    Mutation(
        "the reset forgets the bias",
        ENGINE,
        "for parameter in (projection.weight, projection.bias):",
        "for parameter in (projection.weight,):",
        ROWS + "[tp2-qwen2-dms-fp32-weight]",
    ),
    # The optimizer
    Mutation(
        "clip_grad is not passed on",
        OPTIM,
        "        clip_grad=options.clip_grad,\n",
        "",
        ADAMW + "[clip_grad]",
    ),
    Mutation(
        "adam_beta1 is not passed on",
        OPTIM,
        "        adam_beta1=options.adam_beta1,\n",
        "",
        ADAMW + "[adam_beta1]",
    ),
    Mutation(
        "adam_beta2 is not passed on",
        OPTIM,
        "        adam_beta2=options.adam_beta2,\n",
        "",
        ADAMW + "[adam_beta2]",
    ),
    Mutation(
        "adam_eps is not passed on",
        OPTIM,
        "        adam_eps=options.adam_eps,\n",
        "",
        ADAMW + "[adam_eps]",
    ),
    Mutation(
        "weight_decay is not passed on",
        ENGINE,
        "self._optimizer, rate, self._options.optim.weight_decay",
        "self._optimizer, rate, 0.01",
        ADAMW + "[weight_decay]",
    ),
    Mutation(
        "a run's optimizer options do not reach its engine",
        "dms_train/app/engine.py",
        "        optim=config.optim,\n",
        "        optim=type(config.optim)(lr=config.optim.lr),\n",
        OPTIONS + "test_the_configuration_of_a_run_is_what_the_optimizer_runs_with",
    ),
    Mutation(
        "a stage's learning rate does not reach the optimizer",
        OPTIM,
        '        group["max_lr"], group["min_lr"] = rate.max_lr, rate.min_lr\n',
        '        group["max_lr"] = group["min_lr"] = 1e-3\n',
        ADAMW + "[none]",
    ),
    Mutation(
        "pretrain ignores its own learning rate",
        STAGES,
        "_cosine(_rate_of(p), ",
        "_cosine(1e-4, ",
        RATES,
    ),
    Mutation(
        "zero_neuron ignores its own learning rate",
        STAGES,
        "_constant(_rate_of(z), ",
        "_constant(1e-4, ",
        RATES,
    ),
    Mutation(
        "retrofit ignores its own learning rate",
        STAGES,
        "_constant(_rate_of(r), ",
        "_constant(1e-4, ",
        RATES,
    ),
    Mutation(
        "hold ignores its own learning rate",
        STAGES,
        "_cosine(_rate_of(h), ",
        "_cosine(1e-4, ",
        RATES,
    ),
    Mutation(
        "a stage's own learning rate is replaced by the common one",
        "dms_train/config/resolve.py",
        " if block.lr is None}",
        "}",
        "tests/unit/config/test_resolve.py::test_a_stage_keeps_a_learning_rate_of_its_own",
    ),
    # Method, kernels, inference
    Mutation(
        "the window is one token shorter",
        "dms_train/method/visibility.py",
        "query_positions[:, None] - key_positions[None, :] > window",
        "query_positions[:, None] - key_positions[None, :] >= window",
        "tests/unit/method/test_visibility.py::test_rule_equals_its_description",
    ),
    Mutation(
        "the decision shift is ignored",
        "dms_train/method/dms/spec.py",
        "return self.decision_shift + (",
        "return 0 + (",
        "tests/unit/method/test_visibility.py::test_rule_equals_its_description",
    ),
    Mutation(
        "the temperature of the relaxation is ignored",
        "dms_train/method/decisions.py",
        "z = (logits if noise is None else logits + noise) / tau",
        "z = logits if noise is None else logits + noise",
        PLAIN + "[cr8_step3]",
    ),
    Mutation(
        "the window of the CPU kernel is one token shorter",
        "dms_train/kernels/train_attention/blockwise.py",
        "torch.where(distance > window, ",
        "torch.where(distance >= window, ",
        "tests/unit/kernels/test_blockwise.py::test_output_and_gradients_equal_the_reference",
    ),
    Mutation(
        "the backward pass of the CPU kernel has another window",
        "dms_train/kernels/train_attention/blockwise.py",
        "late = _distance(first, last, old, edge.device) > window",
        "late = _distance(first, last, old, edge.device) >= window",
        PLAIN + "[cr1_step0]",
    ),
    Mutation(
        "the window of the GPU kernel is one token shorter",
        "dms_train/kernels/train_attention/triton_forward.py",
        "tl.where(distance > window, column_bias[None, :], 0.0)",
        "tl.where(distance >= window, column_bias[None, :], 0.0)",
        "tests/unit/kernels/test_triton_train.py::test_output_and_gradients_equal_float64",
    ),
    Mutation(
        "the GPU kernel of the decisions ignores the offset",
        "dms_train/kernels/layers/triton_decide.py",
        "x = scale * eviction_channel - offset",
        "x = scale * eviction_channel",
        "tests/unit/kernels/test_triton_eviction_channel.py::test_decisions_and_their_cost[37-dms-delayed-plain]",
    ),
    Mutation(
        "the cache lets tokens go one token early",
        POLICY,
        "slots.position[:, :, None, :] > self.window",
        "slots.position[:, :, None, :] >= self.window",
        "tests/unit/inference/test_cache.py::test_equals_the_visibility_rule[0.5-delayed-1-9chunks-compact]",
    ),
    Mutation(
        "the cache ignores the decision shift",
        POLICY,
        "column = slots.position + self.shift - base",
        "column = slots.position - base",
        "tests/unit/inference/test_cache.py::test_equals_the_visibility_rule[0.5-delayed-1-9chunks-compact]",
    ),
    Mutation(
        "the cache of pages lets tokens go one token early",
        POLICY,
        "WindowRule(evicts=MARKED, window=self.window, shift",
        "WindowRule(evicts=MARKED, window=self.window - 1, shift",
        "tests/unit/inference/test_paged.py::test_equals_the_visibility_rule[delayed-1-7chunks]",
    ),
    Mutation(
        "generation leaves the eviction channel in the query",
        "dms_train/inference/cache/interface.py",
        "            query, key = method.cleared(query, key)\n",
        "            pass\n",
        "tests/unit/inference/test_parity.py::test_same_text_same_logits[llama-dms-7]",
    ),
    Mutation(
        "the sampling temperature is ignored",
        "dms_train/inference/sampler.py",
        "scores = scores.double() / temperature[:, None].to(scores.device)",
        "scores = scores.double()",
        "tests/unit/inference/test_sampler.py::test_draws_follow_the_softmax_over_the_temperature",
    ),
    Mutation(
        "top-p leaves one token less",
        "dms_train/inference/sampler.py",
        "weight.cumsum(-1) - weight >= least",
        "weight.cumsum(-1) >= least",
        "tests/unit/inference/test_sampler.py::test_tokens_are_drawn_from_what_loops_leave",
    ),
    Mutation(
        "of equal logits the kernel leaves the last ones",
        "dms_train/kernels/layers/triton_restrict.py",
        "((1 << TOKEN_BITS) - 1 - token)",
        "token",
        "tests/unit/kernels/test_restrict.py::test_of_equal_logits_the_first_are_left",
    ),
    Mutation(
        "exported code has a window one token shorter",
        "dms_train/export/shipped/modeling_dms.py",
        "queries[:, None] - keys[None, :] > self.dms.numbers.window",
        "queries[:, None] - keys[None, :] >= self.dms.numbers.window",
        "tests/unit/hf/test_modeling.py::test_equals_independent_forward[llama-dms]",
    ),
    # Packing
    Mutation(
        "a decision governs a key of the document before",
        "dms_train/method/visibility.py",
        "governed = positions + shift < documents.end",
        "governed = positions + shift < torch.full_like(documents.end, len(positions))",
        "tests/unit/method/test_documents.py::test_decisions_and_slots_are_those_of_documents_alone",
    ),
    Mutation(
        "packed documents attend to each other",
        ATTENTION,
        "cu_seqlens = None if self.documents is None else self.documents.cu_seqlens",
        "cu_seqlens = None",
        DOCUMENTS + "[cr8_step3]",
    ),
    Mutation(
        "positions run on over the documents of a sample",
        ATTENTION,
        "at = None if documents is None else documents.positions.t().contiguous()",
        "at = None",
        DOCUMENTS + "[nvidia]",
    ),
    Mutation(
        "the teacher does not see where documents end",
        MODEL,
        "teacher.run_layers(t_hidden, nothing, None, documents)",
        "teacher.run_layers(t_hidden, nothing, None)",
        DOCUMENTS + "[zeroing]",
    ),
    Mutation(
        "padding counts in the mean decision",
        "dms_train/method/dms/attention.py",
        "counted = counted * documents.is_token.t()[..., None]",
        "counted = counted * 1",
        DOCUMENTS + "[cr8_step3]",
    ),
    Mutation(
        "the GPU kernel of the decisions reaches into the document before",
        "dms_train/kernels/layers/triton_decide.py",
        "governs = inside & (i >= first + SHIFT)\n    tl.store",
        "governs = inside & (i >= SHIFT)\n    tl.store",
        "tests/unit/kernels/test_triton_eviction_channel.py::test_decisions_stay_within_their_document[37-dms-delayed-plain]",
    ),
    Mutation(
        "the loss mask of a packed document is that of its inputs",
        "dms_train/data/packed_dataset.py",
        "self._masks.get(*place)[1:]",
        "self._masks.get(*place)[:-1]",
        "tests/unit/data/test_packing.py::test_samples_hold_the_documents_of_their_split_with_their_mask[True]",
    ),
    # The scheduler
    Mutation(
        "the first sequence after another one is preempted for it",
        "dms_train/inference/scheduler.py",
        "return self._idle() or max(after, ",
        "return self._idle() or min(after, ",
        "tests/unit/inference/test_scheduler.py::"
        "test_the_most_recent_sequence_is_preempted_for_the_first",
    ),
    *WIRING,
]
