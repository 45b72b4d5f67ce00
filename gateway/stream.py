"""Answers one request: from its body to the last byte, as one JSON object or as a stream of events."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from kvrelay.errors import ClientGone, InternalError, RequestError, UnknownModel
from kvrelay.gateway.answers import DONE, AnswerShape, error_body, event, to_json
from kvrelay.gateway.body import read_body
from kvrelay.gateway.generation import AnswerText, Generation, Piece
from kvrelay.gateway.logprobs import LogprobsShape
from kvrelay.gateway.openai_api import ChatBody, CompletionBody, RequestBody
from kvrelay.gateway.parsing import BodyParser
from kvrelay.gateway.prompts import PromptEncoder
from kvrelay.gateway.service import Service

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]


class Answer(Response):
    """The response to a request for tokens. Headers go out with the first token, so every refusal is a status."""

    def __init__(
        self,
        service: Service,
        parser: BodyParser,
        encoder: PromptEncoder,
        kind: type[ChatBody] | type[CompletionBody],
    ) -> None:
        """`kind` says what the body should hold."""
        super().__init__()
        self._service = service
        self._parser = parser
        self._encoder = encoder
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers. After the first byte an error is an event of the stream, or the end of it if the client is gone.

        Raises:
            RequestError: nothing was sent yet.
        """
        sender = Sender(send, self._service.settings.client_timeout_s)
        outcome = InternalError.code
        try:
            outcome = await self._answer(scope, receive, sender)
        except RequestError as error:
            outcome = error.code
            if not sender.started:
                raise
        finally:
            self._service.metrics.requests.labels(outcome).inc()

    async def _answer(self, scope: Scope, receive: Receive, sender: "Sender") -> str:
        body = await self._read(scope, receive)
        with self._service.admission() as timeline:
            max_model_len = self._service.max_model_len()
            prompt = await self._encoder.encode(body, max_model_len)
            params = body.sampling_params(max_model_len - len(prompt))
            generation = self._service.submit(
                prompt, params, timeline, param=body.prompt_field, cache_salt=body.cache_salt
            )
            async with self._watched(generation, receive):
                respond = self._stream if body.stream else self._whole
                return await respond(generation, body, sender)

    async def _read(self, scope: Scope, receive: Receive) -> RequestBody:
        settings = self._service.settings
        raw = await read_body(
            scope,
            receive,
            max_bytes=settings.max_body_bytes,
            timeout_s=settings.client_timeout_s,
            whole_timeout_s=settings.request_timeout_s,
        )
        parsed = await self._parser.parse(self._kind, raw)
        self._service.metrics.ignored_fields.inc(parsed.num_ignored)
        if parsed.body.model not in (None, self._service.model):
            raise UnknownModel(
                f"The model {parsed.body.model!r} is not served here; this gateway serves {self._service.model!r}.",
                param="model",
            )
        return parsed.body

    @asynccontextmanager
    async def _watched(self, generation: Generation, receive: Receive) -> AsyncIterator[None]:
        """Cancels the generation as soon as the client leaves, and in any case when the response is over."""
        watcher = asyncio.create_task(self._watch(generation, receive))
        try:
            yield
        finally:
            watcher.cancel()
            self._service.client_gone(generation, "The response ended early.")

    async def _watch(self, generation: Generation, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.client_gone(generation, "The client left.")

    async def _whole(self, generation: Generation, body: RequestBody, sender: "Sender") -> str:
        text = AnswerText(self._encoder.tokenizer, generation.prompt_token_ids, body.stop)
        pieces = [piece async for more in self._pieces(generation, text) for piece in more]
        shape = self._shape(generation, body)
        content = to_json(shape.whole(pieces, text.finish_reason, generation.cached_tokens))
        await sender.start([*_JSON, (b"content-length", str(len(content)).encode())])
        await sender.body(content, more=False)
        return str(text.finish_reason)

    async def _stream(self, generation: Generation, body: RequestBody, sender: "Sender") -> str:
        shape = self._shape(generation, body)
        text = AnswerText(self._encoder.tokenizer, generation.prompt_token_ids, body.stop)
        try:
            async for pieces in self._pieces(generation, text):
                first = not sender.started
                if first:
                    await sender.start(_EVENTS)
                await sender.body(b"".join(_events(shape, pieces, first=first)), more=True)
        except ClientGone:
            raise
        except Exception as error:
            if sender.started:
                await sender.body(event(error_body(_told(error))), more=False)
            raise
        usage = event(shape.last(text.num_tokens, generation.cached_tokens)) if body.include_usage else b""
        await sender.body(usage + DONE, more=False)
        return str(text.finish_reason)

    async def _pieces(self, generation: Generation, text: AnswerText) -> AsyncIterator[list[Piece]]:
        """What came, as it comes, until the sample ends. Raises RequestError when the request fails."""
        while text.finish_reason is None:
            tokens = await generation.take()
            if not tokens:
                raise InternalError("The answer ended without a reason.")
            pieces = []
            for token in tokens:
                pieces.append(text.push(token))
                if text.finish_reason is not None:
                    self._service.stop_string_found(generation)
                    break
            yield pieces

    def _shape(self, generation: Generation, body: RequestBody) -> AnswerShape:
        return AnswerShape(
            chat=isinstance(body, ChatBody),
            request_id=generation.request_id,
            model=self._service.model,
            fingerprint=f"fp_{self._service.cluster.fingerprint[:12]}",
            prompt_token_ids=generation.prompt_token_ids,
            with_ids=body.return_token_ids,
            with_usage=body.include_usage,
            logprobs=None if body.num_logprobs is None else self._logprobs_shape(body),
        )

    def _logprobs_shape(self, body: RequestBody) -> LogprobsShape:
        return LogprobsShape(
            self._encoder.tokenizer, chat=isinstance(body, ChatBody), as_token_ids=body.return_tokens_as_token_ids
        )


class Sender:
    """Sends to the client. The server's `send` waits while the client does not read; this waits `timeout_s` at most."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        """Nothing was sent yet."""
        self._send = send
        self._timeout_s = timeout_s
        self.started = False

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends status 200 and headers. Raises ClientGone if the client reads nothing for too long."""
        self.started = True
        await self._in_time({"type": "http.response.start", "status": 200, "headers": headers})

    async def body(self, content: bytes, *, more: bool) -> None:
        """Sends a part of the body, or the last. Raises ClientGone if the client reads nothing for too long."""
        if content or not more:
            await self._in_time({"type": "http.response.body", "body": content, "more_body": more})

    async def _in_time(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError as error:
            raise ClientGone(f"The client read nothing for {self._timeout_s:g} s.") from error


def _told(error: Exception) -> RequestError:
    """What a client is told of an error. Of a fault of ours, only that it is one."""
    return error if isinstance(error, RequestError) else InternalError("The gateway met a fault of its own.")


def _events(shape: AnswerShape, pieces: list[Piece], *, first: bool) -> Iterator[bytes]:
    for index, piece in enumerate(pieces):
        is_first = first and index == 0
        if shape.shows(piece, first=is_first):
            yield event(shape.chunk(piece, first=is_first))
