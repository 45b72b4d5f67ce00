"""The HTTP routes."""

import logging
import math
import re
import uuid
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.errors import InternalError, NoWorkers, RequestError, UnknownModel
from kvrelay.gateway.answers import error_body, to_json
from kvrelay.gateway.openai_api import ChatBody, CompletionBody
from kvrelay.gateway.parsing import BodyParser
from kvrelay.gateway.prompts import PromptEncoder
from kvrelay.gateway.service import RETRY_AFTER_S, Service
from kvrelay.gateway.stream import Answer

log = logging.getLogger(__name__)

_REQUEST_ID = "x-request-id"
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,256}")
_TRY_AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(service: Service, encoder: PromptEncoder, *, created: int) -> FastAPI:
    """The application. `created` is when the model was loaded, in Unix seconds, for `/v1/models`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestIds)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_fault)
    _add_answers(app, service, encoder)
    _add_models(app, service, created)
    _add_state(app, service)
    return app


def _add_answers(app: FastAPI, service: Service, encoder: PromptEncoder) -> None:
    parser = BodyParser()

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return Answer(service, parser, encoder, ChatBody)

    @app.post("/v1/completions")
    async def completions() -> Response:
        return Answer(service, parser, encoder, CompletionBody)


def _add_models(app: FastAPI, service: Service, created: int) -> None:
    model = {"id": service.model, "object": "model", "created": created, "owned_by": "kvrelay"}

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != service.model:
            raise UnknownModel(f"The model {name!r} is not served here; see /v1/models.", param="model")
        return _json(model)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if not service.cluster.ready:
            raise NoWorkers(service.cluster.why_not_ready)
        return _json({"status": "ready"})

    @app.get("/cluster")
    async def cluster() -> Response:
        return _json(service.snapshot())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.expose(), media_type=_METRICS_TYPE)


class RequestIds:
    """Every answer says which request it belongs to: by the client's `X-Request-Id`, or by one drawn here."""

    def __init__(self, app: ASGIApp) -> None:
        """Wraps `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Adds the header to whatever is sent."""
        request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    given = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == _REQUEST_ID.encode()]
    return given[0] if given and _PRINTABLE.fullmatch(given[0]) else uuid.uuid4().hex


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


async def _on_request_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestError):
        raise error
    headers: dict[str, str] = {}
    if error.status in _TRY_AGAIN:
        headers["retry-after"] = str(math.ceil(error.retry_after_s or RETRY_AFTER_S))
    return _json(error_body(error), error.status, headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Wrong paths and methods."""
    if not isinstance(error, HTTPException):
        raise error
    reason = HTTPStatus(error.status_code)
    content: dict[str, Any] = {
        "message": f"{request.method} {request.url.path}: {reason.phrase}. See the README for what is served.",
        "type": "invalid_request_error",
        "param": None,
        "code": reason.name.lower(),
    }
    return _json({"error": content}, error.status_code, dict(error.headers or {}))


async def _on_fault(request: Request, error: Exception) -> Response:
    log.error("A fault of ours at %s %s.", request.method, request.url.path, exc_info=error)
    fault = InternalError("The gateway met a fault of its own.")
    return _json(error_body(fault), fault.status, {_REQUEST_ID: _request_id(request.scope)})
