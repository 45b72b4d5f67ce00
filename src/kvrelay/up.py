"""`kvrelay up`: a gateway and workers on this machine, kept running until Ctrl-C."""

import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from kvrelay.checkpoint import resolve
from kvrelay.children import ChildSpec, Death
from kvrelay.client import GatewayError, connect, get_json
from kvrelay.config import (
    ClientSettings,
    GatewaySettings,
    Settings,
    UpSettings,
    WorkerOptions,
    WorkerSettings,
    variables,
)
from kvrelay.errors import AddressInUse, StartError
from kvrelay.lines import LineWriter
from kvrelay.supervisor import Supervisor
from kvrelay.types import Role

_STEP_S = 0.1
_LOOK_EVERY = 3  # steps
_SLOW_S = 1.0
_CANNOT_START = 2
_MAX_EARLY_ENDS = 3
_GATEWAY = "gateway"
_LOOPBACK = "127.0.0.1"


def run(settings: UpSettings) -> int:
    """Starts everything and serves until a signal; every process has ended when it returns.

    Raises:
        StartError: the model, an address or a child's start cannot work.
    """
    say = LineWriter(sys.stderr)
    with _said_if_slow(say, f"Fetching and checking the model {settings.model}…"):
        resolve(settings.model, settings.cache_dir)
    settings = with_addresses(settings)
    supervisor = Supervisor(child_specs(settings, os.environ), say)
    with _stop_signals() as stop, connect(http_url(settings), timeout_s=1.0) as client:
        try:
            ClusterRun(settings, supervisor, client, say).until(stop)
        finally:
            supervisor.stop()
    say("Stopped.")
    return 0


@dataclass(slots=True)
class Stop:
    """Whether somebody asked for the end. A plain flag: a lock taken in a signal handler could be held already."""

    asked: bool = False

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Takes a signal."""
        self.asked = True


class ClusterRun:
    """One run from start to stop: which deaths end it, what it waits for, and when it is ready."""

    def __init__(
        self, settings: UpSettings, supervisor: Supervisor, client: httpx.Client, say: Callable[[str], None]
    ) -> None:
        self._url = http_url(settings)
        self._workers = [name for name, _ in worker_names(settings)]
        self._supervisor = supervisor
        self._client = client
        self._say = say
        self._waits_for = ""
        self._came_up: set[str] = set()
        self._early_ends: Counter[str] = Counter()
        self.ready = False

    def until(self, stop: Stop) -> None:
        """Supervises until stopped.

        Raises:
            StartError: a child says that it cannot start, or ended three times before it first came up.
        """
        for step in itertools.count():
            for death in self._supervisor.step():
                self._mourn(death)
            if not self.ready and step % _LOOK_EVERY == 0:
                self._look()
            if stop.asked:
                return
            time.sleep(_STEP_S)

    def _mourn(self, death: Death) -> None:
        if not self.ready:
            self._give_up_if_hopeless(death)
        delay_s = self._supervisor.restart_in_s(death.name)
        words = f" Its last line: {death.words}" if death.words else ""
        self._say(f"{death.name} ended with {death.how} and is started again in {delay_s:.1f} s.{words}")

    def _give_up_if_hopeless(self, death: Death) -> None:
        if death.code == _CANNOT_START:
            raise StartError(f"{death.name} cannot start: {death.words}")
        self._early_ends[death.name] += death.name not in self._came_up
        if self._early_ends[death.name] == _MAX_EARLY_ENDS:
            words = death.words or "it said nothing about why"
            raise StartError(
                f"{death.name} cannot start: it ended {_MAX_EARLY_ENDS} times before it was up, "
                f"the last time with {death.how}: {words}"
            )

    def _look(self) -> None:
        snapshot = cluster_snapshot(self._client)
        if snapshot is not None:
            self._came_up |= {_GATEWAY, *(worker["name"] for worker in snapshot["workers"])}
        waits_for = waiting_for(self._workers, snapshot)
        if snapshot is not None and not waits_for:
            self.ready = True
            LineWriter(sys.stdout)(ready_text(self._url, str(snapshot["model"]), program()))
        elif waits_for != self._waits_for:
            self._waits_for = waits_for
            self._say(waits_for)


def waiting_for(workers: list[str], snapshot: Mapping[str, Any] | None) -> str:
    """What a start still waits for, empty when every one of `workers` has registered, said what it has, and is used.

    `snapshot` is `/cluster`, None while the gateway does not answer.
    """
    if snapshot is None:
        return "Waiting for the gateway to start…"
    reported = {worker["name"] for worker in snapshot["workers"] if worker["ledger"]}
    missing = [name for name in workers if name not in reported]
    if missing:
        return f"Waiting for {', '.join(missing)}: loading the model…"
    if not snapshot["ready"]:
        return f"Waiting: {snapshot['reason']}"
    unused = [worker for worker in snapshot["workers"] if worker["name"] in workers and not worker["usable"]]
    return f"Waiting for {unused[0]['name']}: {unused[0]['reason']}" if unused else ""


def program() -> str:
    """How the user can run this command again: by its name if the shell finds it, else by the path it was run with."""
    path = Path(sys.argv[0])
    found = shutil.which("kvrelay")
    if path.name != "kvrelay" or (found is not None and Path(found).absolute() == path.absolute()):
        return "kvrelay"
    return str(path)


def ready_text(url: str, model: str, program: str) -> str:
    """The one ready line, and below it two commands to paste."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "temperature": 0})
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    elsewhere = "" if url == ClientSettings.model_fields["url"].default else f" --url {url}"
    return f"KVRelay is ready and serves {model} at {url}\n  {curl}\n  {shlex.quote(program)} chat{elsewhere}"


def http_url(settings: UpSettings) -> str:
    """Where this machine reaches the gateway."""
    host = _LOOPBACK if settings.host in ("0.0.0.0", "::", "") else settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def with_addresses(settings: UpSettings) -> UpSettings:
    """Settles both addresses, so that children can be told them. Raises AddressInUse if the HTTP one is taken."""
    port = _bindable_port(settings.host, settings.port)
    listen = settings.listen or f"tcp://{_LOOPBACK}:{_bindable_port(_LOOPBACK, 0)}"
    return settings.model_copy(update={"port": port, "listen": listen})


def worker_names(settings: UpSettings) -> list[tuple[str, Role]]:
    """Every worker to start."""
    counts = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode, Role.BOTH: settings.both}
    return [(f"{role}-{index}", role) for role, count in counts.items() for index in range(count)]


def child_specs(settings: UpSettings, environ: Mapping[str, str]) -> list[ChildSpec]:
    """The gateway and the workers; worker i on core i (modulo those there are), unless --threads asks for more."""
    workers = worker_names(settings)
    specs = [command_spec(_GATEWAY, "gateway", GatewaySettings(**_shared(settings, GatewaySettings)), environ)]
    for index, (name, role) in enumerate(workers):
        worker = WorkerSettings(
            **_shared(settings, WorkerOptions),
            role=role,
            name=name,
            gateways=(settings.listen.replace("//*:", f"//{_LOOPBACK}:").replace("//0.0.0.0:", f"//{_LOOPBACK}:"),),
            core=None if settings.threads else index,
            workers_on_machine=len(workers),
        )
        specs.append(command_spec(name, "prefill" if role is Role.PREFILL else "decode", worker, environ))
    return specs


def command_spec(name: str, command: str, settings: Settings, environ: Mapping[str, str]) -> ChildSpec:
    """`kvrelay COMMAND` with exactly these settings, whatever `KVRELAY_*` variables `environ` has."""
    inherited = {key: value for key, value in environ.items() if not key.upper().startswith("KVRELAY_")}
    return ChildSpec(name, [sys.executable, "-m", "kvrelay", command], {**inherited, **variables(settings)})


def _shared(settings: UpSettings, part: type[Settings]) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in part.model_fields}


def cluster_snapshot(client: httpx.Client) -> dict[str, Any] | None:
    """`/cluster`, None while the gateway does not answer."""
    try:
        return get_json(client, "/cluster")
    except GatewayError:  # it is still starting; if it ends instead, the supervisor says so
        return None


def _bindable_port(host: str, port: int) -> int:
    """The port if it is free (any free one for 0). Whoever binds it later may still lose a race and say so itself."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        raise AddressInUse(
            f"HTTP cannot be served at {host}:{port}: {error.strerror}. Choose another address with --host or --port."
        ) from error


@contextmanager
def _said_if_slow(say: Callable[[str], None], text: str) -> Iterator[None]:
    """Says what takes so long, if it does."""
    timer = threading.Timer(_SLOW_S, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _stop_signals() -> Iterator[Stop]:
    """Turns the signals that ask for an end into a flag, so that children are always ended in order."""
    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
