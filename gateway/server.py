"""The gateway process: HTTP on one side, workers on the other, one event loop between them."""

import asyncio
import functools
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
import uvloop
import zmq

from kvrelay.channel import Listener, split_endpoint
from kvrelay.checkpoint import Checkpoint, resolve
from kvrelay.config import GatewaySettings
from kvrelay.errors import AddressInUse
from kvrelay.gateway.app import build_app
from kvrelay.gateway.chat_template import ChatTemplate
from kvrelay.gateway.control import ControlLoop
from kvrelay.gateway.http_protocol import LimitedHttp
from kvrelay.gateway.prompts import PromptEncoder
from kvrelay.gateway.service import Service
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.process import new_incarnation

log = logging.getLogger(__name__)

GRACE_S = 2  # streams get their error event in this time, then connections are closed
# Longer than clients keep idle connections: whoever closes first may do so just when the next request comes.
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
_SEND_BUFFER_BYTES = 64 * 2**10  # what the kernel holds for a client; small, so that one that does not read is noticed


def run(settings: GatewaySettings) -> int:
    """A gateway process, until SIGINT or SIGTERM. Returns the exit code.

    Raises:
        StartError: it cannot start like this.
    """
    uvloop.run(_until_signal(settings, resolve(settings.model, settings.cache_dir)))
    return 0


async def _until_signal(settings: GatewaySettings, checkpoint: Checkpoint) -> None:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    await serve(settings, checkpoint, stopping)


async def serve(
    settings: GatewaySettings,
    checkpoint: Checkpoint,
    stopping: asyncio.Event,
    *,
    on_serving: Callable[[str, str], None] = lambda _url, _workers: None,
) -> None:
    """Serves until `stopping` is set. `on_serving` gets the URL, and the endpoint at which workers register.

    Raises:
        AddressInUse: the address for clients or for workers cannot be bound.
        ModelError: the model's tokenizer or chat template is not usable.
    """
    tokenizer = Tokenizer.load(checkpoint)
    encoder = PromptEncoder(tokenizer, ChatTemplate.load(tokenizer))
    with bound(settings.host, settings.port, settings.client_timeout_s) as http_socket, _listener(settings) as listener:
        control = ControlLoop(listener, heartbeat_s=settings.heartbeat_s)
        service = Service(
            settings,
            model=checkpoint.name,
            fingerprint=checkpoint.fingerprint,
            incarnation=listener.incarnation,
            send=control.send,
            clock=time.monotonic,
        )
        service.watch_workers(listener.counters)
        app = build_app(service, encoder, created=int(time.time()))
        url = _url(http_socket)

        def started() -> None:
            log.info("Serving %s at %s/v1; workers register at %s.", checkpoint.name, url, listener.endpoint)
            on_serving(url, listener.endpoint)

        await _run(_Server(uvicorn_config(app, settings), started), http_socket, control, service, stopping)


async def _run(
    server: "_Server",
    http_socket: socket.socket,
    control: ControlLoop,
    service: Service,
    stopping: asyncio.Event,
) -> None:
    """HTTP and control side by side. Whichever ends first ends the other: neither is any use alone."""
    controlling = asyncio.create_task(control.run(service))
    serving = asyncio.create_task(server.serve(sockets=[http_socket]))
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({controlling, serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        service.shut_down()
        server.should_exit = True
        await serving
    finally:
        waiting.cancel()
        control.stop()
        await controlling


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to us, and says when it serves."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


def uvicorn_config(app: object, settings: GatewaySettings) -> uvicorn.Config:
    """How HTTP is served."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=functools.partial(LimitedHttp, head_timeout_s=settings.client_timeout_s),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="critical",  # the gateway logs its faults itself
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


@contextmanager
def bound(host: str, port: int, client_timeout_s: float) -> Iterator[socket.socket]:
    """A TCP socket at which clients may connect; port 0 takes a free one.

    The kernel drops connections whose client takes nothing for `client_timeout_s`; what the gateway has given up would
    wait in its buffers for ever.

    Raises:
        AddressInUse: the address is taken, or not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        http_socket = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressInUse(
            f"{host!r} is no address to serve HTTP on ({error.strerror}); choose another --host."
        ) from error
    with http_socket:
        http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            http_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * client_timeout_s))
        try:
            http_socket.bind(address)
            http_socket.listen(_BACKLOG)
        except OSError as error:
            raise AddressInUse(
                f"Cannot serve HTTP at {host}, port {port}: {error.strerror}; choose another --port or --host."
            ) from error
        yield http_socket


@contextmanager
def _listener(settings: GatewaySettings) -> Iterator[Listener]:
    host, port = split_endpoint(settings.listen)
    with zmq.Context() as context:
        listener = Listener(context, host, port, incarnation=new_incarnation())
        try:
            yield listener
        finally:
            listener.close()


def _url(http_socket: socket.socket) -> str:
    host, port = http_socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
