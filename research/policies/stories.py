"""Stories: divergence of a model's next-token distributions on a given text.

The first tokens of a story are a prompt. The later tokens of the story enter the cache one at a
time, like generated tokens. All policies are therefore asked about the same positions.

"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.evaluation.bootstrap import ratio
from dms_train.evaluation.errors import EvaluationError
from dms_train.inference.cache.interface import KVCache
from dms_train.inference.cache_builder import build_cache
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.loader import LoadedModel, load_model
from dms_train.inference.options import EngineOptions
from dms_train.inference.policies.base import RequestSizes
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.tokenizer import Tokenizer
from dms_train.method.losses import kl_teacher_student
from research.policies.cases import DENSE, Case


class _Walk(NamedTuple):
    """Result of one run over all texts.

    Attributes:
        logits: float [texts, tokens after the prompt, vocab].
        reads: Slots attended by a query after the prompt, mean over lists and texts.
        peak_tokens: Largest number of tokens held, mean over lists and texts.
        bytes: Peak bytes for each text.
        seconds: Processor time, prompts included.
    """

    logits: Tensor
    reads: float
    peak_tokens: float
    bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StoriesTask:
    """Stories of a fixed length.

    Attributes:
        model: The dense model.
        file: JSON lines with a `text` each.
        stories: Number of long enough stories, from the end of the file: a model that was trained
            on the first ones has not seen them.
        prompt: Tokens of a prompt.
        tokens: Number of tokens of a story, including the prompt; the rest is left out.
    """

    model: Path
    file: Path
    stories: int = 16
    prompt: int = 160
    tokens: int = 320

    name = "stories"

    def settings(self) -> dict[str, Any]:
        """Return the values that a result depends on, besides the case."""
        return {"stories": self.stories, "prompt": self.prompt, "tokens": self.tokens}

    def measure(self, case: Case) -> Mapping[str, Any]:
        """Measure KL(dense || case) in nats per token with its interval, and means over stories."""
        walk = _walk(self, case)
        dense = _dense_logits(self)
        kl = kl_teacher_student(walk.logits.double(), dense.double())
        estimate = ratio(kl.sum(1).tolist(), [float(kl.shape[1])] * len(kl))
        return {
            "quality": [estimate.value, estimate.low, estimate.high],
            "reads": walk.reads,
            "peak_tokens": walk.peak_tokens,
            "bytes": walk.bytes,
            "ms": 1e3 * walk.seconds / (kl.shape[0] * kl.shape[1]),
            "tokens": float(kl.shape[1]),
        }


@functools.lru_cache(maxsize=1)
def _dense_logits(task: StoriesTask) -> Tensor:
    return _walk(task, Case(method=DENSE, cr=1)).logits


@functools.lru_cache(maxsize=1)
def _texts(task: StoriesTask) -> Tensor:
    """Return the tokens of the stories, int64 [texts, tokens]."""
    tokenizer = Tokenizer.load(task.model)
    if tokenizer is None:
        raise EvaluationError(f"{task.model}: needs a tokenizer.json")
    texts = []
    for line in reversed(task.file.read_text(encoding="utf-8").splitlines()):
        ids = tokenizer.encode(json.loads(line)["text"], special=True)
        if len(ids) >= task.tokens:
            texts.append(ids[: task.tokens])
        if len(texts) == task.stories:
            return torch.tensor(texts)
    raise EvaluationError(
        f"{task.file}: {len(texts)} stories of {task.tokens} tokens; lower --stories or --tokens"
    )


@torch.no_grad()
def _walk(task: StoriesTask, case: Case) -> _Walk:
    texts = _texts(task)
    model = load_model(case.model or task.model, dtype="float32")
    options = EngineOptions(max_num_seqs=len(texts), slab_pages=8, **case.engine(task.tokens))
    policy = build_policy(options.policy, options.policy_options, model.spec)
    cache = build_cache(model, policy, options)
    request = RequestSizes(task.prompt, task.tokens, 0)
    rows = torch.arange(len(texts))
    for row in rows.tolist():
        cache.assign(row, request)
    since, num_read = time.process_time(), 0
    logits, reads, peak = [], [], 0.0
    while num_read < task.tokens:
        inside = max(1, task.prompt - num_read)
        count = min(policy.max_tokens(request, num_read) or inside, inside)
        last, read = _pass(model, cache, texts, slice(num_read, num_read + count))
        num_read += count
        peak = max(peak, cache.live(rows).double().mean().item())
        if num_read >= task.prompt:
            logits.append(last)
        if num_read > task.prompt:
            reads.append(read)
    seconds = time.process_time() - since
    return _Walk(
        torch.stack(logits, 1),
        sum(reads) / len(reads),
        peak,
        cache.peak_bytes / len(texts),
        seconds,
    )


def _pass(model: LoadedModel, cache: KVCache, texts: Tensor, part: slice) -> tuple[Tensor, float]:
    """Return the logits after a part's last token, [texts, vocab], and reads by list and text."""
    position = torch.arange(part.start, part.stop).expand(len(texts), -1)
    rows = torch.arange(len(texts))
    hidden, reads = model.decoder(
        TokenBatch.rectangular(texts[:, part], position.contiguous(), rows), cache
    )
    last = hidden.view(len(texts), -1, hidden.shape[-1])[:, -1]
    return model.decoder.logits(last), reads.double().mean().item()
