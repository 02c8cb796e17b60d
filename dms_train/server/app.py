"""Routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dms_train.inference.chat import ChatTemplate
from dms_train.inference.errors import InferenceError
from dms_train.inference.messages import plain_messages
from dms_train.inference.tokenizer import Tokenizer
from dms_train.server.access import Access
from dms_train.server.admission import Admission
from dms_train.server.answers import AnswerShape, ChatShape, CompletionShape, Json
from dms_train.server.errors import ApiError
from dms_train.server.generation import Generation, Job, Part
from dms_train.server.metrics import Metrics, seconds_text
from dms_train.server.options import ServerOptions
from dms_train.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse,
)
from dms_train.server.worker import EngineThread

T = TypeVar("T")
_BODY_SECONDS = 30.0
_READ_ON = 4  # multiple of the limit that is read: few clients read an answer while they send
_PAGE = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css")} | {
    "/page.js": ("page.js", "text/javascript")
}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Facts about the served model that the routes need.

    Attributes:
        name: Name in requests and answers.
        longest: Most tokens of a sequence.
        vocabulary: Size of the vocabulary; token ids are smaller.
        tokenizer: None if the directory has none.
        template: Chat template.
        created: Time of loading, in seconds since 1970.
    """

    name: str
    longest: int
    vocabulary: int
    tokenizer: Tokenizer | None
    template: ChatTemplate
    created: int


class Api:
    """Handlers of the routes.

    Args:
        model: Served model.
        engine: Thread that runs the model.
        options: Limits of the server.
        admission: Admission of sequences.
        metrics: Counters.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: EngineThread,
        options: ServerOptions,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self._model, self._engine, self._options = model, engine, options
        self._admission, self._metrics = admission, metrics

    async def completions(self, request: Request) -> Response:
        """Serve `/v1/completions`."""
        body = parse(await self._body(request), CompletionBody)
        self._check_model(body.model)
        if body.best_of not in (None, body.n):
            raise ApiError(400, "best_of: only the value of n is supported", param="best_of")
        prompts = [await self._tokens(prompt) for prompt in body.prompts]
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        if max_tokens == 0 and (body.n > 1 or not body.echo):
            raise ApiError(400, "max_tokens: 0 needs echo=true and n=1", param="max_tokens")
        job = self._job(body, prompts, max_tokens, body.logprobs)
        if body.echo:
            texts = await asyncio.to_thread(self._texts, body.prompts)
            params = body.sampling(max_tokens, body.logprobs, of_prompt=True)
            job = replace(job, echo=texts, params=params)
        shape = CompletionShape(_id_of(request), self._model.name, self._model.tokenizer)
        return await self._generate(request, job, shape)

    async def chat(self, request: Request) -> Response:
        """Serve `/v1/chat/completions`."""
        body = parse(await self._body(request), ChatBody)
        self._check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs=true", param="top_logprobs")
        text = await asyncio.to_thread(self._rendered, body)
        prompt = await self._tokens(text, special=False)
        max_tokens = body.token_limit or max(1, self._model.longest - len(prompt))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        job = self._job(body, [prompt], max_tokens, logprobs)
        shape = ChatShape(_id_of(request), self._model.name, self._model.tokenizer)
        return await self._generate(request, job, shape)

    async def embeddings(self, request: Request) -> Response:
        """Refuse `/v1/embeddings`."""
        raise ApiError(400, "embeddings: this server generates text only", code="unsupported")

    async def models(self, request: Request) -> Response:
        """Serve `/v1/models`: a list of the one model."""
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model(self, request: Request) -> Response:
        """Serve `/v1/models/NAME`: the model, if it has this name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._entry())

    async def tokenize(self, request: Request) -> Response:
        """Serve `/tokenize`."""
        body = parse(await self._body(request), TokenizeBody)
        self._check_model(body.model)
        ids = await self._encoded(body.prompt, special=body.add_special_tokens)
        answer = {"count": len(ids), "max_model_len": self._model.longest, "tokens": ids}
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """Serve `/detokenize`."""
        body = parse(await self._body(request), DetokenizeBody)
        self._check_model(body.model)
        self._check_ids(body.tokens, "tokens")
        tokenizer = self._tokenizer()
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, special=True)
        return JSONResponse({"prompt": text})

    async def health(self, request: Request) -> Response:
        """Serve `/health`: 200, or 503 while draining and when the engine is broken."""
        if self._engine.broken is not None:
            return JSONResponse({"status": "broken"}, 503)
        if self._admission.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Serve `/metrics`."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        """Serve the browser page and its files."""
        name, kind = _PAGE[request.url.path]
        content = files("dms_train.server").joinpath("page", name).read_bytes()
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    async def _body(self, request: Request) -> bytes:
        """Read the body, up to the limit."""
        coding = request.headers.get("content-encoding", "")
        if coding.strip().lower() not in ("", "identity"):
            raise ApiError(
                415,
                f"Content-Encoding {coding[:100]}: not supported; send the body as it is",
                headers={"Accept-Encoding": "identity"},
            )
        most = self._options.max_body_bytes
        stated = request.headers.get("content-length", "")
        stated_size = int(stated[:20]) if stated.isdigit() else 0
        size, body = 0, bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                if stated_size <= _READ_ON * most:
                    async for part in request.stream():
                        size += len(part)
                        if size > _READ_ON * most:
                            break
                        body += part if size <= most else b""
        except TimeoutError:
            raise ApiError(408, f"the body took more than {_BODY_SECONDS:.0f} s") from None
        if max(size, stated_size) > most:
            raise ApiError(413, f"the body has more than {most} bytes")
        return bytes(body)

    def _entry(self) -> Json:
        """Return the model in the format of OpenAI's API."""
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "dms-train",
            "max_model_len": self._model.longest,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            raise ApiError(
                404, f"this server has the model {self._model.name}", code="model_not_found"
            )

    def _check_ids(self, ids: list[int], field: str) -> None:
        if any(token >= self._model.vocabulary for token in ids):
            most = self._model.vocabulary - 1
            raise ApiError(400, f"{field}: token ids lie in 0..{most}", param=field)

    def _tokenizer(self) -> Tokenizer:
        if self._model.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer.json; send token ids")
        return self._model.tokenizer

    def _rendered(self, body: ChatBody) -> str:
        """Return the prompt of a chat."""
        try:
            return self._model.template.render(
                plain_messages(body.messages),
                {**self._options.default_chat_template_kwargs, **body.chat_template_kwargs},
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            )
        except InferenceError as error:
            fields = ("messages", "chat_template_kwargs")
            param = next((name for name in fields if str(error).startswith(name)), None)
            raise ApiError(400, str(error), param=param) from None

    async def _encoded(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text."""
        try:
            return await asyncio.to_thread(self._tokenizer().encode, text, special=special)
        except InferenceError as error:
            raise ApiError(400, str(error)) from None

    async def _tokens(self, prompt: str | list[int], *, special: bool = True) -> list[int]:
        """Return a prompt as checked token ids."""
        if isinstance(prompt, str):
            tokens = await self._encoded(prompt, special=special)
        else:
            self._check_ids(prompt, "prompt")
            tokens = prompt
        most = self._options.max_prompt_tokens or self._model.longest
        most = min(most, self._model.longest - 1)
        if not tokens:
            raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
        if len(tokens) > most:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens; this server takes {most}",
                param="prompt",
                code="context_length_exceeded",
            )
        return tokens

    def _texts(self, prompts: list[str | list[int]]) -> list[str]:
        """Return the texts of prompts, as given or decoded from token ids."""
        tokenizer = self._model.tokenizer
        return [
            prompt
            if isinstance(prompt, str)
            else ""
            if tokenizer is None
            else tokenizer.decode(prompt, special=True)
            for prompt in prompts
        ]

    def _job(
        self, body: GenerationBody, prompts: list[list[int]], max_tokens: int, logprobs: int | None
    ) -> Job:
        params = body.sampling(max_tokens, logprobs)
        self._check_ids(list(params.logit_bias), "logit_bias")
        self._check_ids(list(params.stop_token_ids), "stop_token_ids")
        if params.stop:
            self._tokenizer()
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: needs stream=true", param="stream_options")
        if body.kv_positions and (not body.stream or len(prompts) * params.n > 1):
            raise ApiError(400, "kv_positions: needs stream=true, one prompt and n=1")
        return Job(
            prompts=prompts,
            params=params,
            priority=body.priority,
            seconds=self._options.request_seconds,
            stream=body.stream,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            kv_positions=body.kv_positions,
        )

    async def _generate(self, request: Request, job: Job, shape: AnswerShape) -> Response:
        """Run a job; release its sequences when the engine has finished in any way."""
        async with contextlib.AsyncExitStack() as stack:
            leave = stack.enter_context(self._admission.enter(job.sequences))
            generation = Generation(self._engine, self._model.tokenizer, job, leave)
            stack.callback(self._ended, request, generation)
            await stack.enter_async_context(generation)
            if job.stream:
                held = stack.pop_all()
                return _EventStream(_events(generation, shape), held)
            answer = await _until_disconnect(request.receive, _whole(generation, shape))
            return JSONResponse(answer)

    def _ended(self, request: Request, generation: Generation) -> None:
        self._metrics.finished(generation, time.monotonic())
        request.state.notes.append(seconds_text(generation.usage()))


class _EventStream(StreamingResponse):
    """Response of server-sent events; closes `held` at the end or when the client leaves."""

    def __init__(self, events: AsyncIterator[str], held: contextlib.AsyncExitStack) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        async with self._held:
            with contextlib.suppress(ClientDisconnect):
                await _until_disconnect(receive, self.stream_response(send))


async def _whole(generation: Generation, shape: AnswerShape) -> Json:
    parts: dict[int, list[Part]] = {index: [] for index in range(generation.job.sequences)}
    async for part in generation.parts():
        parts[part.index].append(part)
    choices = [shape.choice(index, items) for index, items in parts.items()]
    return {**shape.envelope(chunk=False), "choices": choices, "usage": generation.usage()}


async def _events(generation: Generation, shape: AnswerShape) -> AsyncIterator[str]:
    envelope = shape.envelope(chunk=True)
    try:
        for index in range(generation.job.sequences):
            opening = shape.opening(index)
            if opening is not None:
                yield _event({**envelope, "choices": [opening]})
        async for part in generation.parts():
            if part.text or part.entries or part.finish_reason or part.kv:
                yield _event({**envelope, "choices": [shape.chunk(part)]})
    except ApiError as error:  # the status has been sent
        yield _event(error.body())
        return
    if generation.job.include_usage:
        yield _event({**envelope, "choices": [], "usage": generation.usage()})
    yield "data: [DONE]\n\n"


def _event(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it when the client leaves.

    Raises:
        ClientDisconnect: The client has left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _id_of(request: Request) -> str:
    request_id: str = request.state.request_id
    return request_id


def build_app(api: Api, options: ServerOptions, metrics: Metrics) -> Starlette:
    """Return the ASGI application."""
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        *(Route(path, api.page) for path in _PAGE),
    ]
    access = Middleware(
        Access,
        api_key=options.api_key,
        metrics=metrics,
        routes=frozenset(route.path for route in routes),
    )
    cors = Middleware(  # outermost, because a preflight request has no key
        CORSMiddleware,
        allow_origins=options.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("Retry-After", "X-Request-Id"),
    )
    return Starlette(
        routes=routes,
        middleware=[cors, access] if options.cors_origins else [access],
        exception_handlers={
            ApiError: _api_error,
            InferenceError: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _client_left,
        },
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _refused(request: Request, error: Exception) -> Response:
    return await _api_error(request, ApiError(400, str(error)))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = ApiError(error.status_code, str(error.detail))
    return JSONResponse(refusal.body(), error.status_code, error.headers)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
