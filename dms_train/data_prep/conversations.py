"""Conversations as tokens of a model's chat template, and the tokens that the loss counts.

Templates of reasoning models delete the text before `</think>`, or the reasoning of earlier turns.
That is right for a prompt and wrong for training. Each assistant turn is therefore rendered as a
placeholder and inserted afterwards. The placeholder also shows where the turn begins and ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dms_train.data.errors import DataError
from dms_train.data_prep.documents import Message
from dms_train.data_prep.encode import check_no_message_lost, load_tokenizer

# Private-use characters, which no text holds.
_PLACEHOLDER = "\ue000assistant turn {}\ue001"
_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*$")


class LossOn(StrEnum):
    """Tokens that the loss counts.

    Attributes:
        ASSISTANT: Tokens of assistant turns, and the special token that ends each turn.
        ALL: Every token.
    """

    ASSISTANT = "assistant"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Conversion of a conversation to tokens.

    Attributes:
        tokenizer: Local Hugging Face directory with `tokenizer.json`.
        chat_template: Jinja text; None is the tokenizer's own template.
        variables: Names and values to pass to the template.
        loss_on: Tokens that the loss counts.
        append_eod: End every document in the tokenizer's `eos_token`.
    """

    tokenizer: str
    chat_template: str | None = None
    variables: tuple[tuple[str, str], ...] = ()
    loss_on: LossOn = LossOn.ASSISTANT
    append_eod: bool = False


class ChatText(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: The whole text, including special tokens.
        turns: First character and end of every assistant turn, without its special tokens.
    """

    text: str
    turns: list[tuple[int, int]]


class MaskedTokens(NamedTuple):
    """Tokens of a conversation.

    Attributes:
        tokens: int32 [tokens].
        mask: uint8 [tokens], 1 where the token counts in the loss.
    """

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]


class ChatTemplate:
    """A chat template that renders the same text every day.

    Attributes:
        text: Jinja.
    """

    def __init__(
        self, tokenizer: Any, name: str, given: str | None, variables: tuple[tuple[str, str], ...]
    ) -> None:
        """Find the template.

        Args:
            tokenizer: Tokenizer that renders.
            name: Name of its directory, for messages.
            given: Jinja text; None is the tokenizer's own template.
            variables: Names and values to pass to the template.

        Raises:
            DataError: There is no template, or it writes today's date.
        """
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        try:
            self.text = str(tokenizer.get_chat_template(given))
        except ValueError:
            raise DataError(
                f"{name}: the tokenizer has no chat template; pass one with --chat-template FILE"
            ) from None
        if "strftime_now" in self.text and "date_string" not in self._variables:
            raise DataError(
                f"{name}: the chat template writes today's date, so the data would change from day "
                "to day; pass --template-variable 'date_string=23 July 2024'"
            )

    def apply(
        self, where: str, messages: list[Message], *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation.

        Args:
            where: Location of the conversation, for messages.
            messages: `role` and `content` of each.
            add_generation_prompt: End the text where the assistant continues.

        Raises:
            DataError: The template failed, or leaves out a message.
        """

        def render(messages: list[Message]) -> str:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self.text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
            return text

        try:
            text = render(messages)
        except Exception as error:  # a template may raise anything
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"{where}: the chat template failed ({reason}); "
                "pass a fitting one with --chat-template FILE"
            ) from None
        check_no_message_lost(where, messages, render)
        return text


class ConversationEncoder:
    """A tokenizer with its chat template."""

    def __init__(self, options: ChatOptions) -> None:
        """Load the tokenizer from its directory without running code from it.

        Raises:
            DataError: There is no fast tokenizer or no template, the template writes today's date,
                or the tokenizer has no `eos_token` to append.
        """
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)
        self.vocab_size = len(self._tokenizer)
        self._template = ChatTemplate(
            self._tokenizer, options.tokenizer, options.chat_template, options.variables
        )
        self.template = self._template.text
        added = self._tokenizer.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special}
        self._ends = {self._tokenizer.eos_token_id} - {self._tokenizer.bos_token_id}
        self.eod_id: int | None = None
        if options.append_eod:
            if self._tokenizer.eos_token_id is None:
                raise DataError(f"{options.tokenizer}: the tokenizer has no eos_token to append")
            self.eod_id = int(self._tokenizer.eos_token_id)

    def render(self, where: str, messages: list[Message]) -> ChatText:
        """Return the text of a conversation, with every assistant turn whole.

        Args:
            where: Location of the conversation, for messages.
            messages: `role` and `content` of each.

        Raises:
            DataError: The template failed, left out a message, or repeated or moved an assistant
                turn.
        """
        turns = [m["content"] for m in messages if m["role"] == "assistant"]
        names = [_PLACEHOLDER.format(number) for number in range(len(turns))]
        hidden, left = [], iter(names)
        for message in messages:
            assistant = message["role"] == "assistant"
            hidden.append({**message, "content": next(left)} if assistant else message)
        text = self._template.apply(where, hidden)
        offsets = [text.find(name) for name in names]
        if [text.count(name) for name in names] != [1] * len(names) or offsets != sorted(offsets):
            raise DataError(
                f"{where}: the chat template repeats or moves an assistant turn; "
                "pass one that keeps it with --chat-template FILE"
            )
        edges = [0, *(p + len(n) for p, n in zip(offsets, names, strict=True))]
        between = [text[start:end] for start, end in zip(edges, [*offsets, None], strict=True)]
        return _joined(between, turns)

    def encode(self, where: str, messages: list[Message]) -> MaskedTokens:
        """Return the tokens of a conversation, and a mask of those that the loss counts.

        A token belongs to a turn if it holds any of its characters: SentencePiece joins a blank of
        the template to the first word of the turn. The special token that ends a turn,
        such as `<|im_end|>`, belongs to the turn and teaches the model to stop. After white space
        only the `eos_token` ends a turn, and the white space then belongs to the turn.

        Raises:
            DataError: See `render`; or the text cannot be tokenised.
        """
        text, turns = self.render(where, messages)
        try:
            encoding = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        except Exception as error:  # the tokenizers library raises bare exceptions
            raise DataError(f"{where}: cannot be tokenised ({error})") from None
        ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        if not ids:
            raise DataError(f"{where}: the conversation has no tokens")
        mask = self._mask(ids, [text[first:end] for first, end in offsets], offsets, turns)
        if self.eod_id is not None and ids[-1] != self.eod_id:
            ids.append(self.eod_id)
            mask.append(int(self._options.loss_on is LossOn.ALL))
        return MaskedTokens(np.array(ids, np.int32), np.array(mask, np.uint8))

    def _mask(
        self,
        ids: list[int],
        pieces: list[str],
        offsets: list[tuple[int, int]],
        turns: list[tuple[int, int]],
    ) -> list[int]:
        if self._options.loss_on is LossOn.ALL:
            return [1] * len(ids)
        starts, ends = np.array(offsets).T  # starts never decrease
        mask = np.zeros(len(ids), np.uint8)
        for first, end in turns:
            mask[(ends > first) & (starts < end)] = 1
            after = int(np.searchsorted(starts, end))
            mask[after : self._after_end_token(ids, pieces, after)] = 1
        counted: list[int] = mask.tolist()
        return counted

    def _after_end_token(self, ids: list[int], pieces: list[str], start: int) -> int:
        """Return the index after the special token that ends a turn; `start` if there is none."""
        end = start
        while end < len(ids) and ids[end] not in self._special and pieces[end].isspace():
            end += 1
        # after white space, any other special token begins the next message
        ends = self._special if end == start else self._ends
        return end + 1 if end < len(ids) and ids[end] in ends else start


def _joined(between: list[str], turns: list[str]) -> ChatText:
    """Return the pieces of a template with the turns between them."""
    text, turn_spans = "", []
    for piece, turn in zip(between, turns, strict=False):
        if turn.lstrip().startswith("<think>"):
            # some templates write empty reasoning before a turn that seems to have none
            piece = _EMPTY_REASONING.sub("", piece)
        text += piece
        turn_spans.append((len(text), len(text) + len(turn)))
        text += turn
    return ChatText(text + between[-1], turn_spans)
