"""One run: a model on a task, all lengths and widths of a sweep from the same chains.

The chains are generated once, with the largest length and width. A shorter budget cuts them off,
and a narrower one takes the first of them. Generating them again would give the same tokens and
costs, because a chain depends only on its seed and its number.
"""

from __future__ import annotations

import hashlib
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from dms_train.evaluation.devices import resolve_device
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import (
    SANDBOX,
    TOKENS_PER_LENGTH,
    CachePolicyOptions,
    EvaluationOptions,
)
from dms_train.evaluation.programs import sandbox
from dms_train.evaluation.scaling import results, store
from dms_train.evaluation.scaling.budgets import length_in_tokens
from dms_train.evaluation.scaling.chains import GeneratedDocument, PromptedDocument, generate
from dms_train.evaluation.scaling.costs import joint_peaks, peak_within, reads_within
from dms_train.evaluation.scaling.served import ChainServer
from dms_train.evaluation.scorers.base import AnswerChecker, Score
from dms_train.evaluation.scorers.registry import scorer as find_scorer
from dms_train.evaluation.tasks.base import Document, Messages, Task, fingerprint
from dms_train.evaluation.tasks.data_files import file_sha256
from dms_train.evaluation.tasks.prompts import find_format, load_tokenizer
from dms_train.evaluation.tasks.registry import task as find_task
from dms_train.hf.directory import read_architecture, resolve
from dms_train.hf.formats import read_spec, read_target_cr
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.local_layers import with_windows
from dms_train.inference.policies.registry import build_policy, check_policy, parse_options
from dms_train.method.spec import OPTIONS as METHODS

_MODEL_FILES = ("*.safetensors", "config.json", "export.json", "tokenizer.json")
_PACKAGES = ("dms-train", "torch", "math-verify")
_PEAKS = ("peak", "joint_peak", "joint_peak_shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that was checked, before its model is loaded.

    Attributes:
        options: Options of the run.
        task: Task of the options.
        directory: Directory of the model.
        documents: Documents with their prompts, in order.
        engine: Engine options.
        window: Newest tokens that the policy never evicts; None where it evicts tokens of prompts
            at any later time.
        header: Content of `run.json`.
    """

    options: EvaluationOptions
    task: Task
    directory: Path
    documents: list[PromptedDocument]
    engine: EngineOptions
    window: int | None
    header: dict[str, Any]


class CheckedRun(NamedTuple):
    """Part of a run that files other than the weights decide.

    Attributes:
        options: Options with the defaults of the task.
        task: Task of the options.
        directory: Directory of the model.
        documents: Documents in order.
        prompts: Tokens of each document's prompt.
        longest: Number of tokens of the longest prompt.
        prompt_format: Format around the prompts.
        window: Newest tokens that the policy never evicts; None where it evicts none.
        cr: Compression ratio of the run.
        engine: Engine options.
    """

    options: EvaluationOptions
    task: Task
    directory: Path
    documents: list[Document]
    prompts: list[list[int]]
    longest: int
    prompt_format: str
    window: int | None
    cr: float
    engine: EngineOptions


def check(options: EvaluationOptions) -> CheckedRun:
    """Read documents, and refuse what cannot be run; no weights are read.

    Raises:
        EvaluationError: The task, its data or a value cannot be used.
        FileNotFoundError: The model or a file is absent.
    """
    task, directory = find_task(options.task.name), resolve(options.model.path)
    if find_scorer(task.scorer).runs_code:
        _require_code(task.name, options.run.allow_code)
    if options.model.server is not None and options.policy != CachePolicyOptions():
        raise EvaluationError("policy: the server decides it; leave it out with model.server")
    options = _with_defaults(options, task)
    tokenizer = load_tokenizer(directory)
    prompt_format = find_format(options.model.prompt_format, tokenizer, directory)

    def tokens(messages: Messages) -> list[int]:
        return prompt_format.tokens(messages, tokenizer, directory)

    documents = task.documents(options.task, lambda messages: len(tokens(messages)))
    prompts = [tokens(task.messages(document)) for document in documents]
    longest = max(map(len, prompts))
    window, cr = _policy(options, directory, longest)
    return CheckedRun(
        options=options,
        task=task,
        directory=directory,
        documents=documents,
        prompts=prompts,
        longest=longest,
        prompt_format=prompt_format.name,
        window=window,
        cr=cr,
        engine=_engine_options(options, window),
    )


def _require_code(task: str, allowed: str | None) -> None:
    """Refuse early if programs of the model must not run, or cannot be isolated."""
    if allowed is None:
        raise EvaluationError(
            f"task {task}: runs programs that the model wrote; --allow-code, or "
            f"run.allow_code={SANDBOX}, allows it"
        )
    if allowed == SANDBOX:
        sandbox()


def prepare(options: EvaluationOptions) -> PreparedRun:
    """Run `check`, and hash the model.

    Raises:
        EvaluationError: See `check`.
        FileNotFoundError: Likewise.
        InferenceError: The policy does not support the model's sliding-window layers or sinks.
    """
    checked = check(options)
    options, task, documents = checked.options, checked.task, checked.documents
    assert options.sweep.lengths is not None
    spec = read_spec(checked.directory)
    policy = build_policy(checked.engine.policy, checked.engine.policy_options, spec)
    a = read_architecture(checked.directory)
    windows = [a.attention_layers[layer].window for layer in a.cache_layers]
    policy = with_windows(policy, checked.engine.policy, windows, sinks=a.described.sinks)
    config = {
        "task": _task_config(options),
        "documents": {"count": len(documents), "sha256": fingerprint(documents)},
        "model": {
            "sha256": model_hash(checked.directory),
            "prompt_format": checked.prompt_format,
            "dtype": options.model.dtype,
            **_stored_as(options.model.cache_dtype),
            **({"served": True} if options.model.server is not None else {}),
        },
        "cr": checked.cr,
        "policy": _given(options.policy) | {"name": options.policy.name, "window": checked.window},
        "sampling": asdict(options.sampling),
        "sweep": {"lengths": list(options.sweep.lengths), "widths": list(options.sweep.widths)},
    }
    return PreparedRun(
        options=options,
        task=task,
        directory=checked.directory,
        documents=[
            prompted(task, document, prompt, options)
            for document, prompt in zip(documents, checked.prompts, strict=True)
        ],
        engine=replace(checked.engine, max_model_len=most_tokens(checked)),
        window=(checked.window or 0) if policy.evicts_prompt_only else None,
        header=_header(config, checked),
    )


def _with_defaults(options: EvaluationOptions, task: Task) -> EvaluationOptions:
    """Return the options with the task's own sampling and length where none is given."""
    sampling, sweep, own = options.sampling, options.sweep, task.sampling
    lengths = sweep.lengths
    if lengths is None:
        if own.max_tokens is None:
            raise EvaluationError(
                f"task {task.name}: needs sweep.lengths=[L, ...], in units of 1,024 tokens"
            )
        lengths = (own.max_tokens / TOKENS_PER_LENGTH,)
    if task.scores_truncated and len(lengths) > 1:
        raise EvaluationError(
            f"task {task.name}: its answers have a fixed length; give one of sweep.lengths"
        )
    if options.policy.cr is not None and len(lengths) > 1:
        raise EvaluationError("policy.cr: the budget depends on the length; give one length a run")
    return replace(
        options,
        sampling=replace(
            sampling,
            temperature=own.temperature if sampling.temperature is None else sampling.temperature,
            top_p=own.top_p if sampling.top_p is None else sampling.top_p,
        ),
        sweep=replace(
            sweep, lengths=tuple(sorted(set(lengths))), widths=tuple(sorted(set(sweep.widths)))
        ),
    )


def _policy(options: EvaluationOptions, directory: Path, longest: int) -> tuple[int | None, float]:
    """Return the window of the policy, None without one, and the compression ratio of the run."""
    policy, spec = options.policy, read_spec(directory)
    own = read_target_cr(directory) if spec is not None else 1.0
    if policy.name in ("auto", "keep_all", *METHODS):
        evicts = spec is not None and policy.name != "keep_all"
        ratio = options.model.cr or (own if evicts else 1.0)
        return (spec.window if spec is not None and evicts else None), float(ratio or 1.0)
    assert options.sweep.lengths is not None
    total = longest + length_in_tokens(max(options.sweep.lengths))
    if policy.name != "window":
        ratio = policy.cr or (total / policy.budget if policy.budget else 1.0)
        return None, options.model.cr or max(1.0, ratio)
    if policy.window is None and policy.cr is None:
        raise EvaluationError("policy.name=window: give policy.window or policy.cr")
    if policy.cr is not None:  # with the newest token, a window of w tokens holds w + 1 tokens
        return max(1, int(total / policy.cr) - 1), policy.cr
    assert policy.window is not None
    return policy.window, options.model.cr or max(1.0, total / (policy.window + 1))


def _given(policy: CachePolicyOptions) -> dict[str, Any]:
    """Return the policy's options by name."""
    sizes = {"window": policy.window, "budget": policy.budget, "cr": policy.cr}
    others = parse_options(policy.options)
    for key in sizes.keys() & others.keys():
        raise EvaluationError(f"policy.options: {key} is an option of its own; set policy.{key}")
    return {key: value for key, value in sizes.items() if value is not None} | others


def _engine_options(options: EvaluationOptions, window: int | None) -> EngineOptions:
    model, device = options.model, resolve_device(options.model.device)
    name = options.policy.name
    given = _given(options.policy)
    if name == "window":
        given = {key: value for key, value in given.items() if key != "cr"} | {"window": window}
    check_policy(name, given)
    return EngineOptions(
        policy=name,
        policy_options=given,
        dtype=model.dtype,
        device=device,
        max_num_seqs=max(model.max_num_seqs, max(options.sweep.widths)),
        cache_bytes=model.cache_bytes,
        gpu_memory_utilization=model.gpu_memory_utilization,
        prefill_chunk=model.prefill_chunk,
        decode_steps=model.decode_steps,
        cache_dtype=model.cache_dtype,
    )


def most_tokens(checked: CheckedRun) -> int:
    """Return the maximum number of tokens of a prompt, its chain and a decode burst."""
    lengths = checked.options.sweep.lengths
    assert lengths is not None
    most = checked.longest + length_in_tokens(max(lengths)) + checked.engine.decode_steps
    return min(most, read_architecture(checked.directory).max_position_embeddings)


def _stored_as(cache_dtype: str) -> dict[str, str]:
    """Return how keys and values are stored, unless that is the model's own dtype."""
    return {} if cache_dtype == "auto" else {"cache_dtype": cache_dtype}


def _task_config(options: EvaluationOptions) -> dict[str, Any]:
    """Return the options that decide the documents; the documents themselves are hashed too."""
    names = ("name", "fixture", "limit", "seed", "context_length")
    return {name: getattr(options.task, name) for name in names}


def _method(checked: CheckedRun) -> str:
    """Return the method of the run: Vanilla, the method of the export or the name of a policy."""
    name, spec = checked.options.policy.name, read_spec(checked.directory)
    if checked.cr == 1:
        name = "Vanilla"
    elif spec is not None and name in ("auto", spec.kind):
        name = spec.label
    return name if checked.engine.cache_dtype == "auto" else f"{name}, FP8 pages"


def _header(config: dict[str, Any], checked: CheckedRun) -> dict[str, Any]:
    options, task, cr = checked.options, checked.task, checked.cr
    policy = options.policy.name
    name = Path(options.model.path).name if policy == "auto" else policy
    return {
        "config_hash": store.config_hash(config),
        "config": config,
        "label": name if cr == 1 else f"{name} CR {cr:.3g}",
        "method": _method(checked),
        "title": task.title,
        "aggregate": task.aggregate.value,
        "scores_truncated": task.scores_truncated,
        "publishable": task.publishable,
        "model_path": options.model.path,
        "versions": {name: _version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def model_hash(directory: Path) -> str:
    """Return the SHA-256 of the weights, configuration and tokenizer of a model directory."""
    digest = hashlib.sha256()
    for pattern in _MODEL_FILES:
        for path in sorted(directory.glob(pattern)):
            digest.update(f"{path.name}:{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def prompted(
    task: Task, document: Document, prompt: list[int], options: EvaluationOptions
) -> PromptedDocument:
    """Return a document with its sampling: the longest length and the most chains of the sweep.

    Args:
        task: Task of the document.
        document: The document; its name and `sampling.seed` decide the seed.
        prompt: Tokens of the prompt.
        options: Those of a `CheckedRun`.
    """
    sampling, sweep = options.sampling, options.sweep
    assert sampling.temperature is not None
    assert sampling.top_p is not None
    assert sweep.lengths is not None
    drawn = hashlib.sha256(f"{sampling.seed}:{document.id}".encode()).digest()
    params = SamplingParams(
        n=max(sweep.widths),
        max_tokens=length_in_tokens(max(sweep.lengths)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=int.from_bytes(drawn[:7], "big"),
        stop=task.stop(document),
    )
    return PromptedDocument(document=document, prompt=prompt, params=params)


def evaluate(
    prepared: PreparedRun, note: Callable[[str], None], job: str = "", key: str | None = None
) -> results.RunResult:
    """Generate and score the missing chains of a run, then write its summary.

    Args:
        prepared: From `prepare`.
        note: Called with a line after each document.
        job: SLURM job of this process (`locks.Holder.job`).
        key: Key of the server of `model.server`, if there is one and it asks for a key.

    Raises:
        EvaluationError: The folder holds another run, or the server does not answer.
        LockedError: Another process writes this shard.
    """
    options, folder = prepared.options.run, Path(prepared.options.run.dir)
    store.open_run(folder, prepared.header)
    with (
        store.ChainWriter(folder, options.shard, options.shards, job) as writer,
        AnswerChecker(options.workers, allow_code=options.allow_code) as checker,
    ):
        finished = {row["document"] for row in store.read_chains(folder)}
        mine = prepared.documents[options.shard :: options.shards]
        missing = [each for each in mine if each.document.id not in finished]
        note(f"{len(missing)} of {len(mine)} documents to do")
        if missing:
            found = _generated(prepared, missing, key)
            for number, rows in enumerate(_chains(prepared, found, checker), 1):
                writer.add(rows)
                note(f"{number}/{len(missing)}: {rows[0]['document']}: {_counts(rows)}")
    result = results.load([folder])
    store.write_summary(folder, results.summary(result))
    return result


def _counts(rows: list[store.Row]) -> str:
    right = sum(all(row["correct"]) for row in rows)
    return f"{right} of {len(rows)} chains right, {sum(row['tokens'] for row in rows):,} tokens"


def _chains(
    prepared: PreparedRun,
    found: Iterable[tuple[GeneratedDocument, int | None]],
    checker: AnswerChecker,
) -> Iterator[list[store.Row]]:
    """Yield rows of each document, in the order in which they finish."""
    session, since = secrets.token_hex(8), time.monotonic()
    scorer = find_scorer(prepared.task.scorer)
    for generated, allocated in found:
        texts = [chain.text for chain in generated.chains]
        scores = scorer.scores(generated.prompted.document, texts, checker)
        shared = {
            "session": session,
            "clock": time.monotonic() - since,
            "peak_allocated_bytes": allocated,
        }
        costs = _costs(generated, prepared)
        yield [
            {**_row(generated, index, scores[index]), **costs[index], **shared}
            for index in range(len(generated.chains))
        ]


def _generated(
    prepared: PreparedRun, missing: list[PromptedDocument], key: str | None
) -> Iterator[tuple[GeneratedDocument, int | None]]:
    """Yield documents with the most bytes of the cache so far, which a server does not report."""
    server, most = prepared.options.model.server, prepared.engine.max_num_seqs
    if server is not None:
        chains = ChainServer(server, key, prepared.directory)
        for generated in chains.generate(missing, most):
            yield generated, None
        return
    engine = InferenceEngine(prepared.directory, prepared.engine)
    for generated in generate(engine, missing, most):
        assert engine.kv is not None
        yield generated, engine.kv.peak_allocated_bytes


def _costs(generated: GeneratedDocument, prepared: PreparedRun) -> list[store.Row]:
    """Return the costs of each chain; lists have an entry for each length of the sweep."""
    lengths = prepared.options.sweep.lengths
    assert lengths is not None
    limits = [length_in_tokens(length) for length in lengths]
    known = [chain.kv for chain in generated.chains if chain.kv is not None]
    if not known:
        unknown = dict.fromkeys(("kv_reads", *_PEAKS), [None] * len(limits))
        return [{"prefill_reads": None, "peak_bytes": None, **unknown}] * len(generated.chains)
    traces = [kv.trace for kv in known if kv.trace is not None]
    joint = joint_peaks(traces, limits, prepared.window)
    return [
        {
            "prefill_reads": kv.prefill_reads,
            "kv_reads": [reads_within(trace, limit) for limit in limits],
            "peak": [peak_within(trace, limit) for limit in limits],
            "joint_peak": [peak.separate for peak in peaks],
            "joint_peak_shared": [peak.shared for peak in peaks],
            "peak_bytes": kv.peak_live_bytes,
        }
        for kv, trace, peaks in zip(known, traces, joint, strict=True)
    ]


def _row(generated: GeneratedDocument, index: int, score: Score) -> store.Row:
    """Return one line of a file of chains, without its costs."""
    chain = generated.chains[index]
    return {
        "document": generated.prompted.document.id,
        "chain": index,
        "chains": len(generated.chains),
        "seed": generated.prompted.params.seed,
        "prompt_tokens": generated.prompt_tokens,
        "tokens": chain.tokens,
        "finish_reason": chain.finish_reason,
        "answers": list(score.answers),
        "correct": list(score.correct),
        "verdict": score.verdict,
        "seconds": chain.seconds,
        "text": chain.text,
    }
