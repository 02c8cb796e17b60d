"""Bad input: configuration."""

from __future__ import annotations

import pytest

from tests.e2e.bad_inputs.cases import VALIDATED, Case, check, train
from tests.support.ranks import dms_train, run_ranks
from tests.support.refusals import Outcome, Workspace, run_as


def _in_two_ranks(words: list[str]) -> Outcome:
    """The lines of rank 0. The second rank prints its own when rank 0 takes seconds to end."""
    done = run_ranks(dms_train, 2, *words[1:], timeout=90)
    assert "Traceback" not in done.stderr, "a rank printed a traceback"
    ours = [line for line in done.stderr.splitlines() if line.startswith("config error:")]
    return Outcome(code=done.returncode, stderr="\n".join(ours))


CASES = {
    "unknown-key": Case(
        done="`optim.lrr=1e-4`",
        arrange=train("optim.lrr=1e-4"),
        kind="config error",
        facts=("optim.lrr", "did you mean"),
    ),
    "unknown-key-elsewhere": Case(
        done="`seq_length=64` without its block",
        arrange=train("seq_length=64"),
        kind="config error",
        facts=("data.seq_length", "did you mean"),
    ),
    "plus-unknown-key": Case(
        done="`+optim.momentum=0.9`",
        arrange=train("+optim.momentum=0.9"),
        kind="config error",
        facts=(
            "optim.momentum",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            "clip_grad",
        ),
    ),
    "plus-group": Case(
        done="`+parallel=tp2`",
        arrange=train("+parallel=tp2"),
        kind="config error",
        facts=("parallel=", "write"),
    ),
    "plus-known-key": Case(
        done="`+optim.lr=1e-4`",
        arrange=train("+optim.lr=1e-4"),
        kind="config error",
        facts=("optim.lr=", "write"),
    ),
    "not-an-override": Case(
        done="`'optim.lr 1e-4'`",
        arrange=train("optim.lr 1e-4"),
        kind="config error",
        facts=("key=value", "write"),
    ),
    "unknown-option": Case(
        done="`method=dmz`",
        arrange=train("method=dmz"),
        kind="config error",
        facts=("method=dmz", "method=dms?", "dms_fastdms", "dms_nvidia", "did you mean"),
    ),
    "unknown-experiment": Case(
        done="`experiment=huge`",
        arrange=train("experiment=huge"),
        kind="config error",
        facts=("experiment=huge", "demo", "paper"),
    ),
    "wrong-type": Case(
        done="`optim.lr=fast`",
        arrange=train("optim.lr=fast"),
        kind="config error",
        facts=("optim.lr='fast'",),
    ),
    "wrong-type-whole-number": Case(
        done="`data.global_batch_size=2.5`",
        arrange=train("data.global_batch_size=2.5"),
        kind="config error",
        facts=("data.global_batch_size=2.5",),
    ),
    "wrong-type-list": Case(
        done="`data.paths=corpus`",
        arrange=train("data.paths=corpus"),
        kind="config error",
        facts=("data.paths='corpus'",),
    ),
    "missing-values": Case(
        done="neither `model.path` nor `data.paths` given",
        arrange=lambda workspace: ["train", f"run.dir={workspace.run}"],
        kind="config error",
        facts=("model.path=", "set"),
        lines=2,
    ),
    "config-dir-missing": Case(
        done="`--config-dir` of a folder that is not there",
        arrange=lambda workspace: [
            *workspace.train(),
            f"--config-dir={workspace.folder / 'absent'}",
        ],
        kind="config error",
        facts=("--config-dir",),
    ),
    "tensor-parallel": Case(
        done="tensor parallelism over 4 processes, the model has 2 KV heads",
        arrange=train("parallel=tp4", "data.global_batch_size=4"),
        kind="config error",
        facts=("tensor_model_parallel_size=4", "num_query_groups=2", "use"),
        runner=run_as(4),
    ),
    "world-size": Case(
        done="`parallel=tp2` on 1 process",
        arrange=train("parallel=tp2"),
        kind="config error",
        facts=("2", "1", "start"),
    ),
    "pipeline-layers": Case(
        done="3 pipeline stages for 2 layers",
        arrange=train("parallel.pipeline_model_parallel_size=3"),
        kind="config error",
        facts=("pipeline_model_parallel_size=3", "2", "choose"),
        runner=run_as(3),
    ),
    "virtual-pipeline": Case(
        done="virtual pipeline stages without a pipeline",
        arrange=train("parallel.virtual_pipeline_model_parallel_size=2"),
        kind="config error",
        facts=("virtual_pipeline_model_parallel_size=2", "use"),
    ),
    "sequence-parallel": Case(
        done="sequence parallelism without tensor parallelism",
        arrange=train("parallel.sequence_parallel=true"),
        kind="config error",
        facts=("sequence_parallel=true", "parallel.tensor_model_parallel_size", "1"),
    ),
    "global-batch": Case(
        done="a global batch of 3 in microbatches of 2",
        arrange=train("data.global_batch_size=3", "data.micro_batch_size=2"),
        kind="config error",
        facts=("data.global_batch_size=3", "2", "use"),
    ),
    "gpu-unknown": Case(
        done="`cluster.gpu=h300`",
        arrange=train("cluster.gpu=h300"),
        kind="config error",
        facts=("cluster.gpu=h300", "a100_40gb"),
    ),
    "gpu-memory": Case(
        done="a microbatch of a million samples on a GPU of 80 GB",
        arrange=train(
            "data.global_batch_size=1048576", "data.micro_batch_size=1048576", "cluster.gpu=h100"
        ),
        kind="config error",
        facts=("100", "SXM", "80", "GB"),
    ),
    "window": Case(
        done="a window as long as the samples",
        arrange=train("method.window=32"),
        kind="config error",
        facts=("method.window=32", "data.seq_length=32", "use"),
    ),
    "positions": Case(
        done="samples longer than the model's positions",
        arrange=train("data.seq_length=256"),
        kind="config error",
        facts=("data.seq_length=256", "128", "use"),
    ),
    "target-cr": Case(
        done="`stage.retrofit.target_cr=2 stage.retrofit.start_cr=3`",
        arrange=train("stage.retrofit.start_cr=3"),
        kind="config error",
        facts=("target_cr=2.0", "stage.retrofit.start_cr=3.0"),
    ),
    "unknown-preset": Case(
        done="`method.preset=dmz`",
        arrange=train("method.preset=dmz"),
        kind="config error",
        facts=("method.preset=dmz", "method=dms_fastdms", "method=dms_nvidia", "choose"),
    ),
    "kl-temperature": Case(
        done="`loss.kl_temperature=0`",
        arrange=train("loss.kl_temperature=0"),
        kind="config error",
        facts=("loss.kl_temperature=0.0",),
    ),
    "unknown-stage": Case(
        done="`stage.run=[zero_neuron,retrofti]`",
        arrange=train("stage.run=[zero_neuron,retrofti]"),
        kind="config error",
        facts=("'retrofti'", "did you mean"),
    ),
    "stage-order": Case(
        done="`stage.run=[retrofit,zero_neuron]`",
        arrange=train("stage.run=[retrofit,zero_neuron]"),
        kind="config error",
        facts=("zero_neuron",),
    ),
    "hold-alone": Case(
        done="`stage=hold` without a retrofitted checkpoint",
        arrange=train("stage=hold"),
        kind="config error",
        facts=("run.load",),
    ),
    "validate-alone": Case(
        done="`stage.run=[retrofit,validate_export]`",
        arrange=train("stage.run=[retrofit,validate_export]", "stage.validate_export.samples=2"),
        kind="config error",
        facts=("stage.run", "put"),
    ),
    "validate-samples": Case(
        done="`stage.validate_export.samples=64` with fewer validation samples",
        arrange=train(VALIDATED[0]),
        kind="config error",
        facts=("stage.validate_export.samples=64", "run.eval_samples=2", "lower"),
    ),
    "validate-pattern": Case(
        done="`stage.validate_export.answer_pattern` without a group",
        arrange=train("stage.validate_export.answer_pattern=answer"),
        kind="config error",
        facts=("stage.validate_export.answer_pattern=answer", "0", "use"),
    ),
    "unknown-loss": Case(
        done="`stage.retrofit.loss=mse`",
        arrange=train("stage.retrofit.loss=mse"),
        kind="config error",
        facts=("stage.retrofit.loss=mse",),
    ),
    "unknown-dtype": Case(
        done="`parallel.params_dtype=fp8`",
        arrange=train("parallel.params_dtype=fp8"),
        kind="config error",
        facts=("parallel.params_dtype=fp8", "32", "16"),
    ),
    "unknown-kernels": Case(
        done="`kernels=cuda`",
        arrange=train("kernels=cuda"),
        kind="config error",
        facts=("kernels=cuda",),
    ),
    "triton-on-cpu": Case(
        done="`kernels=triton` without a GPU",
        arrange=train("kernels=triton"),
        kind="error",
        facts=("kernels=triton", "CPU", "GPU", "kernels=auto", "use"),
    ),
    "flex-on-cpu": Case(
        done="`kernels=flex` without a GPU",
        arrange=train("kernels=flex"),
        kind="error",
        facts=("kernels=flex", "CPU", "kernels=auto", "use"),
    ),
    "unknown-layers": Case(
        done="`parallel.layers=te`",
        arrange=train("parallel.layers=te"),
        kind="config error",
        facts=("parallel.layers=te", "transformer_engine"),
    ),
    "transformer-engine-on-cpu": Case(
        done="`parallel.layers=transformer_engine` without a GPU",
        arrange=train("parallel.layers=transformer_engine"),
        kind="error",
        facts=("parallel.layers=transformer_engine", "GPU", "parallel.layers=auto", "use"),
    ),
    "cuda-graph-on-cpu": Case(
        done="`parallel.cuda_graph=always` without a GPU",
        arrange=train("parallel.cuda_graph=always"),
        kind="error",
        facts=("parallel.cuda_graph=always", "CPU", "GPU", "auto"),
    ),
    "cuda-graph-of-packed-documents": Case(
        done="`parallel.cuda_graph=always data.packing=true`",
        arrange=train("parallel.cuda_graph=always", "data.packing=true"),
        kind="config error",
        facts=("parallel.cuda_graph=always", "data.packing=false"),
    ),
    "several-problems": Case(
        done="`optim.lr=0 run.log_interval=0`: a line for each problem",
        arrange=train("optim.lr=0", "run.log_interval=0"),
        kind="config error",
        facts=("optim.lr=0.0",),
        lines=2,
    ),
    "one-line-of-two-ranks": Case(
        done="a wrong value in 2 processes: printed once",
        arrange=train("method.window=32"),
        kind="config error",
        facts=("method.window=32", "use"),
        runner=lambda words: _in_two_ranks(words),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_refused(case: Case, workspace: Workspace) -> None:
    check(case, workspace)
