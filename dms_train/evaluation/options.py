"""Options of validations and evaluations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

from dms_train.limits import AtLeast, Matches, OneOf, Positive, Share

Device = Annotated[str, Matches(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:1")]
MemoryShare = Annotated[float, Positive(), Share()]
COMPARED_POSITIONS = 128  # positions whose logits a validation holds at a time, in float64
SANDBOX = "sandbox"
CODE_MODES = (SANDBOX, "unisolated")
TOKENS_PER_LENGTH = 1024  # tokens per unit of L in L-W-CR
ANSWER_PATTERN = r"(?m)The final answer is (.*?)\.?\s*$"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """Comparison of an export with its teacher.

    Attributes:
        samples: Validation sequences for agreement and cost.
        problems: JSON-lines file of prompts and answers; None generates nothing.
        max_problems: Maximum number of problems, taken in whole lines from the first on.
        max_tokens: Maximum number of tokens to generate for a line.
        answer_pattern: Regular expression with one group; its matches are the answers in order.
        window_only: Also measure the teacher with only its window, as a control.
        max_num_seqs: Lines that are solved at the same time.
        cache_bytes: Size limit of a compact cache, as in `EngineOptions`; None for none.
        gpu_memory_utilization: Share of a GPU's memory to use if `cache_bytes` is None.
        device: `auto` takes a GPU when there is one; `cuda:1` is the second one.
    """

    samples: Annotated[int, AtLeast(1)] = 64
    problems: str | None = None
    max_problems: Annotated[int, AtLeast(1)] = 400
    max_tokens: Annotated[int, AtLeast(1)] = 256
    answer_pattern: str = ANSWER_PATTERN
    window_only: bool = False
    max_num_seqs: Annotated[int, AtLeast(1)] = 100
    cache_bytes: Annotated[int | None, AtLeast(1)] = None
    gpu_memory_utilization: MemoryShare = 0.9
    device: Device = "auto"

    def check(self, path: str) -> Iterator[str]:
        """Report an answer pattern that cannot be used."""
        where = f"{path}.answer_pattern" if path else "answer_pattern"
        try:
            groups = re.compile(self.answer_pattern).groups
        except re.error as error:
            yield f"{where}={self.answer_pattern}: not a regular expression ({error})"
            return
        if groups != 1:
            yield f"{where}={self.answer_pattern}: {groups} groups; use one, for the answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentOptions:
    """Documents of a task to evaluate.

    Attributes:
        path: File of documents; None generates documents, for tasks that can.
        hub: Take the file of the task's data set from the local cache of the hub.
        download: Fetch the file from the hub if the cache lacks it.
        sha256: Required hash of the file; None accepts any.
        subset: Accept another number of documents than were published.
        fixture: Take the five documents that ship with the package.
        limit: Maximum number of documents, from the first on; None takes all.
        seed: Seed of generated documents and of the order of choices.
        count: Documents to generate.
        context_length: Maximum number of tokens of a generated prompt and its answer.
        haystack: Text file that surrounds a needle.
    """

    path: str | None = None
    hub: bool = False
    download: bool = False
    sha256: str | None = None
    subset: bool = False
    fixture: bool = False
    limit: Annotated[int | None, AtLeast(1)] = None
    seed: int = 42
    count: Annotated[int, AtLeast(1)] = 500
    context_length: Annotated[int, AtLeast(1)] = 4096
    haystack: str | None = None

    def check(self, path: str) -> Iterator[str]:
        """Report a download without `hub`."""
        if self.download and not self.hub:
            yield f"{path}.download=true: needs {path}.hub=true"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(DocumentOptions):
    """A task and its documents.

    Attributes:
        name: Name of a task in `evaluation.tasks`.
    """

    name: str = "exam_sheets"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunOptions:
    """Engine settings for a model.

    Attributes:
        cr: Compression ratio in tables; None takes the export's own, or 1.
        prompt_format: Format around a prompt; `auto` chooses by the tokenizer, `template` is the
            chat template of the model.
        dtype: Dtype of weights and cache.
        device: `auto` takes a GPU when there is one; `cuda:1` is the second one.
        max_num_seqs: Chains in the cache at the same time.
        cache_bytes: Size limit of the cache, as in `EngineOptions`; None for none.
        gpu_memory_utilization: Share of a GPU's memory to use if `cache_bytes` is None.
        prefill_chunk: Prompt tokens of a pass.
        decode_steps: Decode steps that the kernels run at once; no result depends on it.
        cache_dtype: `fp8` stores keys and values in e4m3, on a GPU only; `auto` stores them in
            `dtype`.
    """

    cr: Annotated[float | None, AtLeast(1)] = None
    prompt_format: str = "auto"
    dtype: str = "auto"
    device: Device = "auto"
    max_num_seqs: Annotated[int, AtLeast(1)] = 32
    cache_bytes: Annotated[int | None, AtLeast(1)] = None
    gpu_memory_utilization: MemoryShare = 0.9
    prefill_chunk: Annotated[int, AtLeast(1)] = 512
    decode_steps: Annotated[int, AtLeast(1)] = 8
    cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModelOptions(ModelRunOptions):
    """The model, and how the engine runs it.

    Attributes:
        path: Directory or hub id (local cache only).
        server: Address of OpenAI's API, such as `http://127.0.0.1:8000/v1`, of a server that
            generates in place of the engine. It serves the model in `path`.
    """

    path: str
    server: Annotated[str | None, Matches(r"https?://\S+", "http://HOST:PORT/v1")] = None

    def check(self, path: str) -> Iterator[str]:
        """Report settings of the engine where a server generates."""
        if self.server is None:
            return
        for each in fields(ModelRunOptions):
            ours = each.name in ("cr", "prompt_format", "max_num_seqs")
            if not ours and getattr(self, each.name) != each.default:
                yield f"{path}.{each.name}: the server decides it; leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicyOptions:
    """Cache policy, and its options.

    Attributes:
        name: Policy of the engine; `auto` is what the model was trained for.
        window: Option of the policy, in tokens.
        budget: Option of the policy, in tokens.
        cr: Option of the policy, a compression ratio. The `window` policy divides the length of the
            longest prompt and answer by it.
        options: Other options of the policy, such as `sinks=2`.
    """

    name: str = "auto"
    window: Annotated[int | None, AtLeast(1)] = None
    budget: Annotated[int | None, AtLeast(1)] = None
    cr: Annotated[float | None, AtLeast(1)] = None
    options: tuple[str, ...] = ()

    def check(self, path: str) -> Iterator[str]:
        """Report two sizes of the window."""
        if self.name == "window" and self.window is not None and self.cr is not None:
            yield f"{path}: give window or cr, not both"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSamplingOptions:
    """Sampling of chains; None takes the sampling that the task is published with.

    Attributes:
        temperature: 0 is greedy.
        top_p: Share of the probability that is sampled from.
        top_k: Tokens that are sampled from; -1 takes all.
        seed: Seed of all chains; the tokens of a chain do not depend on other chains.
    """

    temperature: Annotated[float | None, AtLeast(0)] = None
    top_p: Annotated[float | None, Share()] = None
    top_k: int = -1
    seed: Annotated[int, AtLeast(0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Budgets that one run measures: all lengths with all widths.

    Attributes:
        lengths: Maximum numbers of generated tokens of a chain, in units of 1,024; None takes the
            task's own.
        widths: Chains of a document.
    """

    lengths: tuple[float, ...] | None = None
    widths: tuple[int, ...] = (1,)

    def check(self, path: str) -> Iterator[str]:
        """Report budgets that cannot be used."""
        for length in self.lengths if self.lengths is not None else (1.0,):
            if not 1 <= length * TOKENS_PER_LENGTH < math.inf:
                yield f"{path}.lengths={length:g}: units of 1,024 tokens; at least one token"
        if self.lengths == ():
            yield f"{path}.lengths=[]: give at least one"
        if not self.widths or min(self.widths) < 1:
            yield f"{path}.widths={list(self.widths)}: give chains of a document, at least 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolderOptions:
    """Output folder, and this process's share of the documents.

    Attributes:
        dir: Folder of the run; the processes of one run share it.
        shard: Number of this process, from 0.
        shards: Number of processes.
        workers: Processes that compare answers or run programs.
        allow_code: Run programs that the model wrote, with limits on time, memory and output:
            `sandbox` in bubblewrap, `unisolated` with the rights of this process.
    """

    dir: str = "outputs/eval"
    shard: Annotated[int, AtLeast(0)] = 0
    shards: Annotated[int, AtLeast(1)] = 1
    workers: Annotated[int, AtLeast(1)] = 1
    allow_code: Annotated[str | None, OneOf(None, *CODE_MODES)] = None

    def check(self, path: str) -> Iterator[str]:
        """Report a shard beyond the last one."""
        if self.shard >= self.shards:
            yield f"{path}.shard={self.shard}: shards are numbered from 0 to {self.shards - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """A run of `dms-eval`.

    Attributes:
        task: Documents.
        model: Model and engine.
        policy: Cache policy.
        sampling: Sampling of the chains.
        sweep: Budgets.
        run: Folder and share of this process.
    """

    task: TaskOptions
    model: EvaluatedModelOptions
    policy: CachePolicyOptions
    sampling: ChainSamplingOptions
    sweep: SweepOptions
    run: RunFolderOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStageOptions:
    """The stage `run_tasks`: what `dms-eval` measures on the export of a run.

    Attributes:
        tasks: Names of tasks in `evaluation.tasks`.
        task: Their documents.
        model: Engine settings for the export.
        policy: Cache policy.
        sampling: Sampling of the chains.
        sweep: Budgets.
        workers: Processes that compare answers or run programs.
        allow_code: Run programs that the model wrote, with limits on time, memory and output:
            `sandbox` in bubblewrap, `unisolated` with the rights of this process.
    """

    tasks: tuple[str, ...] = ()
    task: DocumentOptions = DocumentOptions()
    model: ModelRunOptions = ModelRunOptions()
    policy: CachePolicyOptions = CachePolicyOptions()
    sampling: ChainSamplingOptions = ChainSamplingOptions()
    sweep: SweepOptions = SweepOptions()
    workers: Annotated[int, AtLeast(1)] = 1
    allow_code: Annotated[str | None, OneOf(None, *CODE_MODES)] = None

    def check(self, path: str) -> Iterator[str]:
        """Report tasks that cannot share their settings."""
        if len(set(self.tasks)) != len(self.tasks):
            yield f"{path}.tasks=[{', '.join(self.tasks)}]: name each task once"
        for key in ("path", "sha256"):
            if len(self.tasks) > 1 and getattr(self.task, key) is not None:
                yield f"{path}.task.{key}: tasks cannot share a file; name one task"

    def of_task(self, name: str, model: str, folder: str) -> EvaluationOptions:
        """Return the options of `dms-eval` for one of the tasks.

        Args:
            name: Name of the task.
            model: Directory of the model.
            folder: Folder of the results.
        """
        return EvaluationOptions(
            task=TaskOptions(name=name, **_fields(self.task)),
            model=EvaluatedModelOptions(path=model, **_fields(self.model)),
            policy=self.policy,
            sampling=self.sampling,
            sweep=self.sweep,
            run=RunFolderOptions(dir=folder, workers=self.workers, allow_code=self.allow_code),
        )


NO_TASKS = TaskStageOptions()


def _fields(options: DocumentOptions | ModelRunOptions) -> dict[str, Any]:
    return {each.name: getattr(options, each.name) for each in fields(options)}
