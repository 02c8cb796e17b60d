"""The model class of lm-evaluation-harness over the inference engine.

Prompts, lengths and answers are handled like in the harness' own class for transformers (`HFLM`).
Both give the same numbers for the same weights.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.loading import BETWEEN
from dms_train.hf.directory import resolve
from dms_train.hf.errors import HFError
from dms_train.hf.tokenizer_files import read_chat_tokenizer
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import CompletionOutput, RequestOutput
from dms_train.inference.tokenizer import read_stop_ids

# A request of a likelihood: (context and continuation, or None), context ids, continuation ids.
Scored = tuple[tuple[str, str] | None, list[int], list[int]]
Answer = tuple[float, bool]
_AHEAD = 4  # requests in the engine for each cache row, so that rows never wait for the host
_TEXTS = 1024  # texts that are encoded at a time
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)


class _Shared(NamedTuple):
    """Requests with one context, which is computed once.

    Attributes:
        context: Token ids.
        continuations: Token ids of each.
        numbers: Numbers of the requests.
    """

    context: list[int]
    continuations: list[list[int]]
    numbers: list[int]


@dataclass(slots=True)
class PeakTokens:
    """Counter of the most tokens that each request holds; continuations count separately.

    Attributes:
        requests: Number of finished requests.
        total: Their peak tokens, summed.
        most: Largest of them.
    """

    requests: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, output: RequestOutput) -> None:
        """Count a finished request."""
        for each in output.outputs:
            self.requests += 1
            self.total += each.kv.peak_live_tokens
            self.most = max(self.most, each.kv.peak_live_tokens)


class EngineLM(TemplateLM):  # type: ignore[misc]
    """A model for `lm_eval.simple_evaluate`, dense or exported with DMS.

    Likelihoods are computed through the cache, with the tokens that the model would hold at each
    position of a generated text. The continuations of one context share its computation.

    Args:
        model: Directory or hub id (local cache only), with a tokenizer.
        options: Engine options.
        seed: Seed of sampled answers; each request has random numbers of its own.
        examples_only: End the prompts of likelihoods after their examples, where cache policies
            then evict. The question is given with the answer, whose tokens alone are scored.

    Attributes:
        engine: Runs the requests.
        tokenizer: Tokenizer of transformers.
        peaks: Peak tokens of finished requests; a caller may replace the counter.

    Raises:
        EvaluationError: The directory has no tokenizer that transformers can read.
    """

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions,
        *,
        seed: int = 1234,
        examples_only: bool = False,
    ) -> None:
        super().__init__()
        directory = resolve(model)
        self.tokenizer = _tokenizer(directory)
        self.engine = InferenceEngine(directory, options)
        self.peaks = PeakTokens()
        self._stop_ids = sorted(read_stop_ids(directory))
        self._seed, self._name = seed, str(model)
        self._examples_only = examples_only
        self._prefix = self.tokenizer.decode(self.prefix_token_id)
        self._encoded: dict[str, list[int]] = {}  # token ids by text, of prepared requests

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        if self.tokenizer.eos_token_id is not None:
            return int(self.tokenizer.eos_token_id)
        if not self._stop_ids:
            raise EvaluationError(f"{self._name}: states no end-of-text token; add eos_token_id")
        return self._stop_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a text."""
        return self.engine.longest

    @property
    def max_gen_toks(self) -> int:
        """Maximum number of tokens to generate for a task without its own number."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in caches of prepared requests."""
        return self._name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render messages by the model's chat template.

        Args:
            chat_history: Messages with `role` and `content`.
            add_generation_prompt: Let the assistant speak next; otherwise the last message is
                its own, to be continued.

        Raises:
            EvaluationError: The model has no template, or the template refuses the messages.
        """
        try:
            text: str = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # a template may raise any error about its messages
            reason = " ".join(str(error).split())[:200]
            raise EvaluationError(f"{self._name}: chat template: {reason}") from None
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            string: The text.
            add_special_tokens: Put the tokenizer's special tokens around the text; None adds them
                unless it begins with the first of them.
        """
        if add_special_tokens is None:
            if string in self._encoded:
                return self._encoded[string]
            add_special_tokens = not string.startswith(self._prefix)
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """Return log-likelihoods of continuations, and whether greedy decoding gives them.

        Args:
            requests: Each with a context and a continuation.
            disable_tqdm: Hide the progress.
        """
        pairs = [request.args for request in requests]
        texts = [text for c, more in pairs if c for text in (c + more, c.rstrip())]
        if self._examples_only:
            texts += [_examples(context) for context, _ in pairs]
        texts = list(dict.fromkeys(texts))  # the harness would encode these one by one
        self._encoded = dict(zip(texts, self._encode_all(texts), strict=True))
        answers: list[Answer] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-likelihoods of whole texts, in windows of the model's maximum length.

        Args:
            requests: Each with a text.
            disable_tqdm: Hide the progress.
        """
        texts: list[str] = [request.args[0] for request in requests]
        windows: list[Scored] = []
        owners = []
        for number, tokens in enumerate(self._encode_all(texts)):
            for window in utils.get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(number)
        log_likelihoods = [0.0] * len(texts)
        for owner, (value, _) in zip(
            owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True
        ):
            log_likelihoods[owner] += value
        for text, total in zip(texts, log_likelihoods, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return log_likelihoods

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return continuations up to the first stop text.

        Args:
            requests: Each with a context and its `generation_kwargs`.
            disable_tqdm: Hide the progress.

        Raises:
            EvaluationError: A key of `generation_kwargs` is not known, or the answer is too long.
        """
        prompts, params = [], []
        contexts = self._encode_all([request.args[0] for request in requests])
        for number, (request, context) in enumerate(zip(requests, contexts, strict=True)):
            stated = request.args[1]
            how = self._params(stated, self._seed + number)
            longest = self.max_length - how.max_tokens
            if longest < 1:
                raise EvaluationError(
                    f"max_gen_toks={how.max_tokens}: the model takes {self.max_length} tokens with "
                    "the prompt; lower it with --gen-kwargs"
                )
            prompts.append((context or [self.prefix_token_id])[-longest:])
            params.append(how)

        def add(number: int) -> str:
            return self.engine.add_request(prompts[number], params[number], final_only=True)

        texts = [""] * len(requests)
        for number, output in self._outputs(len(requests), add, "generate_until", disable_tqdm):
            text = self.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
            texts[number] = postprocess_generated_text(text, list(params[number].stop), None)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[Answer]:
        """Return the log-probability of each continuation, and whether greedy decoding gives it."""
        shared = self._by_context(requests)
        self._encoded = {}

        def add(number: int) -> str:
            return self.engine.add_scoring(shared[number].context, shared[number].continuations)

        answers: list[Answer] = [(0.0, True)] * len(requests)
        for group, output in self._outputs(len(shared), add, "loglikelihood", disable_tqdm):
            for number, completion in zip(shared[group].numbers, output.outputs, strict=True):
                answers[number] = _answer(completion, len(requests[number][2]))
        for (texts, _context, _continuation), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        """Encode texts like `tok_encode`, many at a time on all cores."""
        encoded: list[list[int]] = [[]] * len(texts)
        for special in (False, True):
            numbers = [i for i, x in enumerate(texts) if x.startswith(self._prefix) != special]
            for begin in range(0, len(numbers), _TEXTS):
                batch = numbers[begin : begin + _TEXTS]
                ids = self.tokenizer([texts[i] for i in batch], add_special_tokens=special)
                for number, tokens in zip(batch, ids["input_ids"], strict=True):
                    encoded[number] = tokens
        return encoded

    def _by_context(self, requests: Sequence[Scored]) -> list[_Shared]:
        """Group requests by their contexts, cut at the left to the model's maximum length."""
        most = self.engine.options.max_num_seqs
        shared: list[_Shared] = []
        last: dict[tuple[int, ...], _Shared] = {}
        for number, (texts, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise EvaluationError(
                    f"a continuation of {len(continuation)} tokens: the model scores 1 to "
                    f"{self.max_length}"
                )
            ids = (context + continuation)[-(self.max_length + 1) :]
            given = len(continuation)
            if self._examples_only and texts is not None:
                given += len(context) - self._examples_length(texts[0], context)
            given = min(given, len(ids) - 1)
            key = tuple(ids[:-given])
            if key not in last or len(last[key].numbers) == most:
                last[key] = _Shared(list(key), [], [])
                shared.append(last[key])
            last[key].continuations.append(ids[-given:])
            last[key].numbers.append(number)
        return shared

    def _examples_length(self, text: str, context: list[int]) -> int:
        """Return how many tokens of a context are those of its examples; all if it has none."""
        examples = _examples(text)
        if not examples:
            return len(context)
        pairs = zip(context, self.tok_encode(examples), strict=False)
        return max(1, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def _params(self, stated: dict[str, Any], seed: int) -> SamplingParams:
        """Return the engine's parameters for a task's `generation_kwargs`."""
        given = dict(normalize_gen_kwargs(stated, self.max_gen_toks))
        end = self.tokenizer.decode(self.eot_token_id)
        until = handle_stop_sequences(given.pop("until"), end)
        most, sampled = given.pop("max_gen_toks"), given.pop("do_sample")
        unknown = sorted(set(given) - set(_SAMPLING))
        if unknown:
            raise EvaluationError(
                f"generation_kwargs {', '.join(unknown)}: not an option of the engine, which takes "
                f"until, max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
            )
        temperature = float(given.pop("temperature", 0.0))
        return SamplingParams(
            **{**given, "top_k": given.get("top_k") or -1},
            temperature=temperature if sampled else 0.0,
            max_tokens=most,
            seed=seed,
            stop=tuple(text for text in until if text),
            stop_token_ids=(self.eot_token_id,),
        )

    def _outputs(
        self, count: int, add: Callable[[int], str], title: str, disable_tqdm: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield finished requests with their numbers, in the order in which they finish.

        Args:
            count: Number of requests.
            add: Adds the request of a number to the engine; returns its id.
            title: Title of the progress.
            disable_tqdm: Hide the progress.
        """
        waiting, running = deque(range(count)), dict[str, int]()
        ahead = _AHEAD * self.engine.options.max_num_seqs
        try:
            with tqdm(total=count, desc=title, disable=disable_tqdm) as progress:
                while waiting or running:
                    while waiting and len(running) < ahead:
                        number = waiting.popleft()
                        running[add(number)] = number
                    for output in self.engine.step():
                        if output.finished:
                            _require_whole(output)
                            self.peaks.add(output)
                            progress.update()
                            yield running.pop(output.request_id), output
        finally:
            for request_id in running:
                self.engine.abort(request_id)


def _tokenizer(directory: Path) -> Any:
    """Return transformers' tokenizer of a model directory."""
    try:
        return read_chat_tokenizer(directory)
    except HFError as error:
        raise EvaluationError(str(error)) from None


def _examples(context: str) -> str:
    """Return the part of a context before its question: up to the last empty line."""
    before, line, _ = context.rpartition(BETWEEN)
    return before + line


def _answer(completion: CompletionOutput, count: int) -> Answer:
    """Return the likelihood of the last `count` tokens of a completion."""
    scores = completion.scores
    assert scores is not None
    return sum(scores.logprobs[-count:]), all(scores.greedy[-count:])


def _require_whole(output: RequestOutput) -> None:
    if any(each.finish_reason == "memory" for each in output.outputs):
        length = len(output.prompt_token_ids)
        raise InferenceError(
            f"a prompt of {length} tokens: the cache is too small for it; raise --cache-bytes"
        )
