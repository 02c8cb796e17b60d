"""Tokenisation of documents by several processes, in order."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dms_train.data.errors import DataError
from dms_train.data_prep.documents import Document, Message
from dms_train.hf.chat_messages import find_lost
from dms_train.hf.errors import HFError
from dms_train.hf.tokenizer_files import read_chat_tokenizer
from dms_train.observe.processes import end_with_parent

_ITEMS_PER_CHUNK = 64
Item = TypeVar("Item")
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    """Options of the conversion of a document to token ids.

    Attributes:
        tokenizer: Local Hugging Face directory with `tokenizer.json`.
        append_eod: Append the end-of-document token to every document.
        eod_token: End-of-document token; None is the tokenizer's `eos_token`.
        add_bos: Put the tokenizer's `bos_token` before every document.
        chat_template: Jinja text for conversations; None is the tokenizer's own template.
    """

    tokenizer: str
    append_eod: bool = False
    eod_token: str | None = None
    add_bos: bool = False
    chat_template: str | None = None


class Encoded(NamedTuple):
    """Token ids of consecutive documents.

    Attributes:
        documents: int32 [tokens] for each document.
        size: Number of bytes of the input files in these documents.
    """

    documents: list[npt.NDArray[np.int32]]
    size: int


class ChunkEncoder(Protocol[Item, Result]):
    """Encoder of consecutive items."""

    def encode(self, chunk: list[Item], /) -> Result:
        """Return the result of a chunk."""
        ...


class DocumentEncoder:
    """A tokenizer with its special tokens resolved."""

    def __init__(self, options: EncoderOptions) -> None:
        """Load the tokenizer from its directory, without downloads and without running its code.

        Raises:
            DataError: The directory holds no fast tokenizer, or a special token does not exist.
        """
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)
        self.vocab_size = len(self._tokenizer)
        eod_token = options.eod_token or self._tokenizer.eos_token
        self.eod_id = self._special_id(eod_token, "eos_token") if options.append_eod else None
        bos_token = self._tokenizer.bos_token
        self._bos_id = self._special_id(bos_token, "bos_token") if options.add_bos else None

    def encode(self, documents: list[Document]) -> Encoded:
        """Tokenise documents; special tokens already in a document are not repeated.

        Raises:
            DataError: A chat template failed or lost text, or a document cannot be tokenised.
        """
        # One by one, because the tokenizer would spread a batch over threads on all cores.
        rows = [self._encode_one(document) for document in documents]
        return Encoded(rows, sum(document.size for document in documents))

    def _encode_one(self, document: Document) -> npt.NDArray[np.int32]:
        text = self._text(document)
        try:
            row = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # the tokenizers library raises bare exceptions
            raise DataError(f"{document.where}: cannot be tokenised ({error})") from None
        if not row:
            raise DataError(f"{document.where}: the document has no tokens")
        if self._bos_id is not None and row[0] != self._bos_id:
            row.insert(0, self._bos_id)
        if self.eod_id is not None and row[-1] != self.eod_id:
            row.append(self.eod_id)
        return np.array(row, dtype=np.int32)

    def _special_id(self, token: str | None, name: str) -> int:
        if token is None:
            raise DataError(f"{self._options.tokenizer}: the tokenizer has no {name}")
        token_id = self._tokenizer.get_vocab().get(token)
        if token_id is None:
            raise DataError(f"{self._options.tokenizer}: the tokenizer has no token {token!r}")
        return int(token_id)

    def _text(self, document: Document) -> str:
        if isinstance(document.content, str):
            return document.content
        try:
            text = self._rendered(document.content)
        except Exception as error:  # a template may raise anything
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"{document.where}: the chat template failed ({reason}); "
                "pass a fitting one with --chat-template FILE"
            ) from None
        check_no_message_lost(document.where, document.content, self._rendered)
        _check_turns_whole(document.where, document.content, text)
        return text

    def _rendered(self, messages: list[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, chat_template=self._options.chat_template, tokenize=False
        )
        return text


def encode_in_order(
    items: Iterable[Item],
    encoder: ChunkEncoder[Item, Result],
    make: Callable[[], ChunkEncoder[Item, Result]],
    workers: int,
) -> Iterator[Result]:
    """Encode a stream of items in chunks; the result does not depend on `workers`.

    Args:
        items: Items; they are read only as the workers need them.
        encoder: Encoder for `workers` 1.
        make: Picklable function that makes the encoder of a worker process.
        workers: Number of processes.
    """
    stream = iter(items)
    chunks = iter(lambda: list(islice(stream, _ITEMS_PER_CHUNK)), [])
    if workers == 1:
        yield from map(encoder.encode, chunks)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (make,))
    pending: deque[Future[Result]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_encode_in_worker, chunk))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, perhaps out of memory; try fewer workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker_encoder: ChunkEncoder[Any, Any] | None = None


def _start_worker(make: Callable[[], ChunkEncoder[Any, Any]]) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
    end_with_parent()
    _worker_encoder = make()


def _encode_in_worker(chunk: list[Any]) -> Any:
    assert _worker_encoder is not None
    return _worker_encoder.encode(chunk)


def load_tokenizer(directory: str) -> Any:
    """Return transformers' tokenizer of a directory without running code of the directory.

    Raises:
        DataError: There is none, it does not load, or it differs from `tokenizer.json`.
    """
    try:
        return read_chat_tokenizer(Path(directory))
    except HFError as error:
        raise DataError(str(error)) from None


def check_no_message_lost(
    where: str, messages: list[Message], render: Callable[[list[Message]], str]
) -> None:
    """Refuse a conversation if the chat template leaves out one of its messages.

    Args:
        where: Location of the conversation, for the message.
        messages: `role` and `content` of each.
        render: Function that applies the template.

    Raises:
        DataError: The template leaves out a message.
    """
    lost = find_lost(messages, render)
    if lost is not None:
        raise DataError(
            f"{where}: the chat template leaves out message {lost + 1} of role "
            f"{messages[lost]['role']!r}; correct the role, or pass a template that writes it with "
            "--chat-template FILE"
        )


def _check_turns_whole(where: str, messages: list[Message], text: str) -> None:
    """Refuse a rendering with an incomplete assistant turn; some templates cut the reasoning."""
    position = 0
    for message in messages:
        content = message["content"].strip()
        start = text.find(content, position)
        if start >= 0:
            position = start + len(content)
        elif message["role"] == "assistant":
            raise DataError(
                f"{where}: the chat template drops part of an assistant turn; "
                "pass one that keeps it whole with --chat-template FILE"
            )
