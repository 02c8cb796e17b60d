"""`LLM(path)`: prompts, chats and conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import resolve
from dms_train.inference.accounting import TotalKV
from dms_train.inference.chat import ChatTemplate
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.messages import plain_messages
from dms_train.inference.options import EngineOptions, SamplingParams, named_options
from dms_train.inference.outputs import RequestOutput
from dms_train.inference.request_builder import Prompt
from dms_train.inference.tokenizer import Tokenizer
from dms_train.method.base import MethodSpec

Prompts = Prompt | list[Prompt] | list[str] | list[list[int]]


class LLM:
    """Model that continues prompts; the entry point of offline inference.

    Args:
        model: Directory or hub id (local cache only), of a family in `families`, dense or exported
            with DMS.
        options: Options of the engine; None takes them from `overrides`.
        **overrides: Fields of `EngineOptions`.

    Attributes:
        engine: Engine that runs the requests.
    """

    def __init__(
        self, model: str | Path, options: EngineOptions | None = None, **overrides: Any
    ) -> None:
        self._model = model
        self.engine = InferenceEngine(model, named_options(options, overrides))

    @property
    def options(self) -> EngineOptions:
        """Options of the engine."""
        return self.engine.options

    @property
    def architecture(self) -> Architecture:
        """Sizes of the model."""
        return self.engine.architecture

    @property
    def spec(self) -> MethodSpec | None:
        """Method that the model was trained with; None for a dense model."""
        return self.engine.spec

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and computation."""
        return self.engine.dtype

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if its directory has none."""
        return self.engine.tokenizer

    @property
    def kv(self) -> TotalKV | None:
        """Cache statistics so far; None before any request has finished."""
        return self.engine.kv

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory that holds tokens now, page tables included."""
        return self.engine.allocated_bytes

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: Texts, token id lists or `{"prompt_token_ids": [...]}`; one or several.
            sampling_params: Parameters for all prompts, or a list with one entry per prompt.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            InferenceError: A prompt is empty, too long or not of this vocabulary.
        """
        request_ids = self._add(prompts, sampling_params, final_only=True)
        outputs = {o.request_id: o for batch in self._passes(request_ids) for o in batch}
        return [outputs[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer chats, with the chat template of the model directory.

        Args:
            messages: A chat or several, each a list of messages with `role` and `content` as in
                OpenAI's API.
            sampling_params: Parameters for all chats, or a list with one entry per chat.
            add_generation_prompt: End the prompt with the beginning of an assistant message.
            continue_final_message: End the prompt inside the last message, so that the model
                continues it; needs `add_generation_prompt=False`.
            chat_template_kwargs: Variables of the chat template, such as `enable_thinking` of
                Qwen3.

        Returns:
            One output per chat, in the order of the chats.

        Raises:
            InferenceError: The model has no chat template, a message is malformed or not text, the
                template does not read a variable, or as in `generate`.
        """
        several = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
        prompts = [
            self._template.render(
                plain_messages(chat),
                chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for chat in (messages if several else [messages])
        ]
        if self.tokenizer is None:
            raise InferenceError("the model has no tokenizer.json; give token ids to generate")
        # the template writes the special tokens
        tokens = [self.tokenizer.encode(prompt, special=False) for prompt in prompts]
        return self.generate(tokens, sampling_params)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> Iterator[list[RequestOutput]]:
        """Continue prompts as `generate` does, and return an iterator over the steps.

        Args:
            prompts: As in `generate`.
            sampling_params: As in `generate`.

        Returns:
            For each step, the outputs of the requests that took part: their tokens so far and their
            cache statistics. The cache of a finished request is freed before the next step.
        """
        passes = self._passes(self._add(prompts, sampling_params, final_only=False))
        next(passes)  # started, so that dropping the iterator aborts its requests
        return passes

    def conversation(self) -> Conversation:
        """Open a conversation, which keeps its cache between turns; close it to free the cache."""
        return Conversation(self.engine)

    def logits(self, token_ids: list[int]) -> Tensor:
        """Compute the logits at every token of a text through the cache.

        Args:
            token_ids: The text.

        Returns:
            float [len(token_ids), vocab].
        """
        return self.engine.logits(token_ids)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.load(resolve(self._model))

    def _add(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None,
        *,
        final_only: bool,
    ) -> list[str]:
        """Add a request per prompt; if one is refused, abort all of them."""
        items = _as_list(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        each = params if isinstance(params, list) else [params] * len(items)
        if len(each) != len(items):
            raise InferenceError(f"{len(items)} prompts but {len(each)} sampling_params")
        request_ids: list[str] = []
        try:
            for prompt, how in zip(items, each, strict=True):
                request_id = self.engine.add_request(
                    prompt, how, final_only=final_only, keep_cache=not final_only
                )
                request_ids.append(request_id)
        except BaseException:
            self._abort(request_ids)
            raise
        return request_ids

    def _passes(self, request_ids: list[str]) -> Iterator[list[RequestOutput]]:
        """Yield an empty list, then the outputs of each step until all requests have finished."""
        unfinished = set(request_ids)
        try:
            yield []
            while unfinished:
                outputs = self.engine.step(unfinished)
                yield outputs
                finished = [o.request_id for o in outputs if o.finished]
                self._abort(finished)
                unfinished.difference_update(finished)
        finally:
            self._abort(request_ids)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)


class Conversation:
    """Conversation whose turns share one cache; tokens evicted in an earlier turn stay evicted.

    `LLM.conversation` creates it. Use it as a context manager, or call `close`.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._request_id = engine.open_conversation()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Append a prompt to all tokens so far, and continue.

        An error in the middle of a forward pass closes the conversation.

        Args:
            prompt: Text or token ids of this turn only.
            sampling_params: Sampling parameters of this turn.

        Raises:
            InferenceError: The conversation is closed, or the prompt is refused.
        """
        self._engine.add_turn(self._request_id, prompt, sampling_params)
        outputs: list[RequestOutput] = []
        try:
            while not outputs:
                outputs = self._engine.step([self._request_id])
        except BaseException:
            self.close()
            raise
        return outputs[0]

    def close(self) -> None:
        """Free the cache; further turns are refused."""
        self._engine.abort(self._request_id)


def _as_list(prompts: Any) -> list[Prompt]:
    """Return one prompt or several as a list."""
    if hasattr(prompts, "tolist"):  # an array or a tensor
        prompts = prompts.tolist()
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InferenceError("prompts: give text, token ids or a list of either")
    items = list(prompts)
    return [items] if items and isinstance(items[0], Integral) else items
