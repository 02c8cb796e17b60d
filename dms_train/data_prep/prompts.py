"""Conversion of rows with a prompt, text or messages, to the tokens that a model continues."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dms_train.data.errors import DataError
from dms_train.data.manifest import Source
from dms_train.data_prep.chat_rows import KEYS
from dms_train.data_prep.conversations import ChatTemplate
from dms_train.data_prep.documents import Message, checked_messages, checked_text
from dms_train.data_prep.encode import load_tokenizer
from dms_train.data_prep.overlap import EvaluationSets, Overlap
from dms_train.data_prep.rows import Row, Shard
from dms_train.data_prep.samples import Outcome

COLUMNS = ("prompt", "messages")
_DOCUMENT_COLUMN = "text"
_ANSWER_MARK = "####"  # of GSM8K, whose answers are whole solutions
_CHARACTERS_PER_TOKEN = 8  # more than text has on average


class Beginning(NamedTuple):
    """Length of a document's beginning that the model continues.

    Attributes:
        shortest: Fewest tokens; shorter documents are left out.
        longest: Most tokens.
        seed: Seed of the lengths.
    """

    shortest: int
    longest: int
    seed: int = 0

    @property
    def passage(self) -> int:
        """Characters of a passage, into which text files are cut."""
        return _CHARACTERS_PER_TOKEN * self.longest

    def draw(self, row: int, tokens: int) -> int:
        """Return the length for a document, uniform from `shortest` to at most `longest`."""
        last = min(self.longest, tokens)
        return random.Random(f"{self.seed} {row}").randint(self.shortest, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options of the conversion of a row to a prompt.

    Attributes:
        tokenizer: Local directory of the model.
        column: Column of the prompt; None takes the first of `COLUMNS` that a row has.
        chat: True to make a text a user turn.
        suffix: Text that is appended to a text prompt.
        beginning: Length of the part that the model continues; None for the whole text.
        answer_column: Column of the answer to the prompt; None for rows without answers.
        chat_template: Jinja text; None takes the tokenizer's template.
        variables: Names and values to pass to the template.
    """

    tokenizer: str
    column: str | None = None
    chat: bool = False
    suffix: str = ""
    beginning: Beginning | None = None
    answer_column: str | None = None
    chat_template: str | None = None
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that may hold the prompt."""
        if self.column is not None:
            return (self.column,)
        return COLUMNS if self.beginning is None else (_DOCUMENT_COLUMN,)


class Prompt(NamedTuple):
    """Prompt of a row.

    Attributes:
        number: Number of the row.
        source: Number of its input.
        key: Name of the row; empty if it has none.
        tokens: Tokens that the model continues; empty for a rejected row.
        rejected: Reason for leaving the row out; None if it is kept.
        overlap: Overlap with an evaluation set.
        answer: Right answer; empty if it is unknown.
    """

    number: int
    source: int
    key: str
    tokens: list[int]
    rejected: Outcome | None = None
    overlap: Overlap | None = None
    answer: str = ""


class EmptyPrompts:
    """Source of rows with an empty prompt."""

    def __init__(self, count: int) -> None:
        """Provide `count` rows."""
        nothing = hashlib.sha256(b"").hexdigest()
        self.sources: tuple[Source, ...] = (
            Source(name=f"{count} empty prompts", sha256=nothing, rows=0),
        )
        self.total: int | None = count

    def read(self, first: int, shard: Shard) -> Iterator[Row]:
        """Yield the rows of a shard with numbers from `first` on."""
        for number in range(first, self.total or 0):
            if shard.holds(number):
                yield Row(number, 0, f"row {number}", {COLUMNS[0]: ""})


class PromptEncoder:
    """Encoder of prompts: a tokenizer, and its chat template if a row needs it.

    Attributes:
        vocab_size: Number of tokenizer entries.
        chat_template: Renderer of messages; None if the tokenizer has no template.
        eos_id: Id of the `eos_token`; None if there is none.
    """

    def __init__(self, options: PromptOptions, sets: EvaluationSets, longest: int) -> None:
        """Load the tokenizer from its directory without running code from it.

        Args:
            options: Conversion of a row to a prompt.
            sets: Problems that must not be trained on.
            longest: Largest number of tokens in a document; a prompt must be shorter.

        Raises:
            DataError: There is no fast tokenizer, or no template although every row needs one.
        """
        self._options = options
        self._sets = sets
        self._longest = longest
        self._tokenizer = load_tokenizer(options.tokenizer)
        self._template: ChatTemplate | None = None
        self.vocab_size = len(self._tokenizer)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        self.chat_template = options.chat_template or self._tokenizer.chat_template
        if options.chat or options.chat_template is not None:
            self.template()

    def template(self) -> ChatTemplate:
        """Return the chat template.

        Raises:
            DataError: The tokenizer has none, or it writes today's date.
        """
        if self._template is None:
            options = self._options
            self._template = ChatTemplate(
                self._tokenizer, options.tokenizer, options.chat_template, options.variables
            )
        return self._template

    def encode(self, row: Row) -> Prompt:
        """Return the prompt of a row, or a rejected prompt with the reason.

        Raises:
            DataError: The row has no such column, or another type in it; the template failed; an
                empty prompt has no token to begin with.
        """
        key = next((str(row.values[name]) for name in KEYS if row.values.get(name) is not None), "")
        rejected = Prompt(row.number, row.source, key, [])
        content = self._content(row)
        if content is None:
            return rejected._replace(rejected=Outcome.MISSING_VALUE)
        asked = content if isinstance(content, str) else _asked(content)
        overlap = self._sets.find(asked)
        if overlap is not None:
            return rejected._replace(rejected=Outcome.EVALUATION_OVERLAP, overlap=overlap)
        tokens = self._tokens(row.where, content)
        beginning = self._options.beginning
        if beginning is not None:
            if len(tokens) < beginning.shortest:
                return rejected._replace(rejected=Outcome.TOO_SHORT)
            tokens = tokens[: beginning.draw(row.number, len(tokens))]
        if len(tokens) >= self._longest:
            return rejected._replace(rejected=Outcome.TOO_LONG)
        return rejected._replace(tokens=tokens, answer=self._answer(row))

    def _answer(self, row: Row) -> str:
        column = self._options.answer_column
        value = None if column is None else row.values.get(column)
        text = "" if value is None else str(value)
        _, mark, answer = text.rpartition(_ANSWER_MARK)
        return answer.replace(",", "").strip() if mark else text.strip()

    def _content(self, row: Row) -> str | list[Message] | None:
        """Return text, or messages without final assistant turns; None if the row has neither."""
        columns = [name for name in self._options.columns if name in row.values]
        if not columns:
            raise DataError(
                f"{row.where}: needs a column {' or '.join(self._options.columns)}; "
                "name another with --column"
            )
        value = next((row.values[n] for n in columns if row.values[n] is not None), None)
        if value is None:
            return None
        if isinstance(value, list):
            messages = checked_messages(row.where, value)
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            return messages or None
        return checked_text(row.where, value)

    def _tokens(self, where: str, content: str | list[Message]) -> list[int]:
        if isinstance(content, str):
            content += self._options.suffix
            if self._options.chat:
                content = [{"role": "user", "content": content}]
        if isinstance(content, str):
            return self._ids(where, content, special=True) or self._beginning(where)
        text = self.template().apply(where, content, add_generation_prompt=True)
        return self._ids(where, text, special=False)

    def _ids(self, where: str, text: str, *, special: bool) -> list[int]:
        try:
            encoding = self._tokenizer(text, add_special_tokens=special, verbose=False)
        except Exception as error:  # the tokenizers library raises bare exceptions
            raise DataError(f"{where}: cannot be tokenised ({error})") from None
        ids: list[int] = encoding["input_ids"]
        return ids

    def _beginning(self, where: str) -> list[int]:
        bos: Any = self._tokenizer.bos_token_id
        if bos is None:
            raise DataError(
                f"{where}: the prompt is empty, and the tokenizer has no bos_token to begin with; "
                "give prompts with text"
            )
        return [int(bos)]


def _asked(messages: list[Message]) -> str:
    return "\n".join(message["content"] for message in messages if message["role"] == "user")
