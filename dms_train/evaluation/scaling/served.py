"""Chains from a server with OpenAI's API, such as `vllm serve`; their costs are not known."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.chains import (
    GeneratedChain,
    GeneratedDocument,
    PromptedDocument,
)

_PATIENCE_SECONDS = 3600  # until a chain is complete


class ChainServer:
    """Client of a server that completes prompts.

    Args:
        address: Address of the API, such as `http://127.0.0.1:8000/v1`.
        key: Key that requests carry; None for none.
        directory: Directory of the model that the server should have.

    Raises:
        EvaluationError: The server cannot be reached, lists no model, or another directory.
    """

    def __init__(self, address: str, key: str | None, directory: Path) -> None:
        self._address = address.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        with self._expected("models"):
            listed = self._call("models")["data"]
            if not listed:
                raise EvaluationError(f"{self._address}/models: lists no model; start one there")
            self._model: str = listed[0]["id"]
            self._longest: int | None = listed[0].get("max_model_len")
            self._require_model(listed[0], directory)

    def generate(
        self, documents: Sequence[PromptedDocument], max_num_seqs: int
    ) -> Iterator[GeneratedDocument]:
        """Yield documents in the order in which all of their chains are complete.

        Every chain is a request of its own, with the tokens of the prompt and a seed that follows
        from the document and the number of the chain.

        Args:
            documents: Documents to generate for.
            max_num_seqs: Requests at the same time.

        Raises:
            EvaluationError: A prompt is too long for the server, or a request fails.
        """
        for document in documents:
            self._require_room(document)
        pool = ThreadPoolExecutor(max_num_seqs)
        chains = [
            [pool.submit(self._chain, each, index) for index in range(each.params.n)]
            for each in documents
        ]
        numbers = {chain: number for number, own in enumerate(chains) for chain in own}
        complete: Counter[int] = Counter()
        try:
            for chain in as_completed(numbers):
                chain.result()
                number = numbers[chain]
                complete[number] += 1
                if complete[number] == len(chains[number]):
                    yield GeneratedDocument(
                        prompted=documents[number],
                        prompt_tokens=len(documents[number].prompt),
                        chains=[each.result() for each in chains[number]],
                    )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _require_model(self, listed: dict[str, Any], directory: Path) -> None:
        """Refuse another directory of this machine; other names tell nothing."""
        for name in (listed.get("root"), listed["id"]):  # vLLM states a path as `root`
            if name and Path(name).is_dir():
                if not Path(name).samefile(directory):
                    raise EvaluationError(
                        f"model.path={directory}: {self._address} serves {name}; correct "
                        "model.path or model.server"
                    )
                return

    def _require_room(self, document: PromptedDocument) -> None:
        prompt_tokens = len(document.prompt)
        if self._longest is not None and prompt_tokens >= self._longest:
            raise EvaluationError(
                f"document {document.document.id}: its prompt has {prompt_tokens:,} tokens, and "
                f"{self._address} takes {self._longest:,} with the answer; raise its limit"
            )

    def _chain(self, document: PromptedDocument, index: int) -> GeneratedChain:
        ids, params, since = document.prompt, document.params, time.monotonic()
        request = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": min(params.max_tokens, (self._longest or math.inf) - len(ids)),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": (params.seed or 0) + index,
            "stop": list(params.stop),
            **({} if params.top_k == -1 else {"top_k": params.top_k}),
        }
        with self._expected("completions"):
            answer = self._call("completions", request)
            choice = answer["choices"][0]
            return GeneratedChain(
                text=choice["text"],
                tokens=answer["usage"]["completion_tokens"],
                token_ids=None,
                finish_reason=choice["finish_reason"],
                seconds=time.monotonic() - since,
                kv=None,
            )

    @contextmanager
    def _expected(self, route: str) -> Iterator[None]:
        """Report an answer in which something is absent."""
        try:
            yield
        except (LookupError, TypeError, AttributeError):
            raise EvaluationError(
                f"{self._address}/{route}: not an answer of OpenAI's API; correct model.server"
            ) from None

    def _call(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        url = f"{self._address}/{route}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS) as stream:
                answer: dict[str, Any] = json.load(stream)
        except urllib.error.HTTPError as error:
            raise EvaluationError(f"{url}: {error.code} {_message(error)}") from None
        except (OSError, ValueError) as error:
            raise EvaluationError(
                f"{url}: no answer ({error}); start a server there, or correct model.server"
            ) from None
        return answer


def _message(error: urllib.error.HTTPError) -> str:
    """Return what a server says of an error, as one line."""
    text = error.read().decode(errors="replace")
    try:
        content = json.loads(text)
        text = str(content.get("error", content).get("message", text))
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]
