"""Formats that models expect around a prompt, and detection of the format of a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.tasks.base import Messages
from dms_train.inference.chat import ChatTemplate
from dms_train.inference.errors import InferenceError
from dms_train.inference.tokenizer import Tokenizer

_LLAMA_SYSTEM = (
    "Cutting Knowledge Date: December 2023\nToday Date: 23 July 2024\n\n"
    "You are a helpful assistant."
)


_REASONING = "<think>\n"  # begins the answer of R1 and its distilled models


def _llama3(messages: Messages) -> str:
    """Return the prompt for Llama 3, with the date in the paper's prompt (appendix F)."""
    system = messages.system or _LLAMA_SYSTEM
    turns = "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"
        for role, text in (("system", system), ("user", messages.user))
    )
    return f"{turns}<|start_header_id|>assistant<|end_header_id|>\n\n{messages.answer_prefix}"


def _r1(messages: Messages) -> str:
    """Return the prompt for DeepSeek R1 and its distilled models; the reasoning has begun."""
    reasoning = messages.answer_prefix or _REASONING
    return f"{messages.system}<｜User｜>{messages.user}<｜Assistant｜>{reasoning}"  # noqa: RUF001


def _chatml(messages: Messages) -> str:
    system = f"<|im_start|>system\n{messages.system}<|im_end|>\n" if messages.system else ""
    return (
        f"{system}<|im_start|>user\n{messages.user}<|im_end|>\n"
        f"<|im_start|>assistant\n{messages.answer_prefix}"
    )


def plain_text(messages: Messages) -> str:
    """Join the parts as they are: a base model continues the task's text."""
    before = f"{messages.system}\n\n" if messages.system else ""
    return f"{before}{messages.user}{messages.answer_prefix}"


FORMATS: dict[str, Callable[[Messages], str]] = {
    "llama3": _llama3,
    "r1": _r1,
    "chatml": _chatml,
    "plain": plain_text,
}
AUTO, TEMPLATE = "auto", "template"
# A special token of each format. More specific ones come first, because R1's tokenizers also know
# the tokens of ChatML.
_MARKS = {
    "r1": "<｜Assistant｜>",  # noqa: RUF001
    "llama3": "<|start_header_id|>",
    "chatml": "<|im_start|>",
}


def detect_format(knows: Callable[[str], bool]) -> str:
    """Return the format whose special token is in a vocabulary; `plain` if none is.

    Args:
        knows: Function that tells whether a text is one token of the vocabulary.
    """
    return next((name for name, mark in _MARKS.items() if knows(mark)), "plain")


class PromptFormat(NamedTuple):
    """A format around the prompts of a task.

    Attributes:
        name: One of `FORMATS`, or `template` with the first digits of its SHA-256.
        write: Function that returns the text which a model continues.
        complete: True if this text has every special token, so that the tokenizer adds none.
    """

    name: str
    write: Callable[[Messages], str]
    complete: bool = False

    def tokens(self, messages: Messages, tokenizer: Tokenizer, directory: Path) -> list[int]:
        """Return the tokens that a model continues.

        Args:
            messages: Prompt of the task.
            tokenizer: Tokenizer of the model.
            directory: Directory of the model, for messages.

        Raises:
            EvaluationError: The chat template refuses the messages, or the tokenizer their text.
        """
        if messages.plain:
            return encode(tokenizer, plain_text(messages), directory)
        text = self.write(messages)
        return encode(tokenizer, text, directory, special=not self.complete)


def find_format(name: str, tokenizer: Tokenizer, directory: Path) -> PromptFormat:
    """Return the format that `model.prompt_format` names.

    Args:
        name: One of `FORMATS`; `auto` chooses by the tokenizer; `template` is the chat template of
            the model.
        tokenizer: Tokenizer of the model.
        directory: Directory of the model.

    Raises:
        EvaluationError: There is no such format, or no chat template that renders the same text
            every day.
        HFError: The chat template cannot be read.
        InferenceError: The chat template is not text.
    """
    if name == AUTO:
        name = detect_format(tokenizer.knows)
    if name == TEMPLATE:
        template = _chat_template(directory)
        digest = hashlib.sha256(template.source.encode()).hexdigest()[:12]
        return PromptFormat(f"{name} {digest}", partial(_from_template, template), complete=True)
    if name not in FORMATS:
        known = ", ".join((AUTO, TEMPLATE, *FORMATS))
        raise EvaluationError(f"model.prompt_format={name}: choose one of {known}")
    return PromptFormat(name, FORMATS[name])


def _chat_template(directory: Path) -> ChatTemplate:
    """Return the chat template of a model; refuse one whose prompts change from day to day."""
    template = ChatTemplate.load(directory)
    if not template.source:
        problem = "has no chat template"
    elif "strftime_now" in template.source:
        problem = "has a chat template that writes today's date, so prompts would change every day"
    else:
        return template
    known = ", ".join((AUTO, *FORMATS))
    raise EvaluationError(
        f"model.prompt_format={TEMPLATE}: {directory} {problem}; choose one of {known}"
    )


def _from_template(template: ChatTemplate, messages: Messages) -> str:
    """Return the prompt in a chat template, without `<think>` before an answer that has begun."""
    turns = (("system", messages.system), ("user", messages.user))
    chat = [{"role": role, "content": content} for role, content in turns if content]
    try:
        text = template.render(chat)
    except InferenceError as error:
        raise EvaluationError(f"model.prompt_format={TEMPLATE}: {error}") from None
    if messages.answer_prefix:
        text = text.removesuffix(_REASONING)
    return f"{text}{messages.answer_prefix}"


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a model.

    Raises:
        EvaluationError: The directory holds none.
    """
    tokenizer = Tokenizer.load(directory)
    if tokenizer is None:
        raise EvaluationError(f"{directory}: tasks need a tokenizer.json beside the model")
    return tokenizer


def encode(
    tokenizer: Tokenizer, prompt: str, directory: Path, *, special: bool = True
) -> list[int]:
    """Return the tokens of a prompt, with those that the tokenizer adds if `special`.

    Raises:
        EvaluationError: The tokenizer, of the model in `directory`, cannot encode it.
    """
    try:
        return tokenizer.encode(prompt, special=special)
    except InferenceError as error:
        raise EvaluationError(
            f"{directory}: its tokenizer cannot encode the task's prompts ({error})"
        ) from None
