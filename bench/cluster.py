"""A cluster for a benchmark: `kvrelay up` on a free port or processes of its own, ended with everything it started."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvrelay.children import ChildSpec
from kvrelay.client import connect
from kvrelay.errors import StartError
from kvrelay.supervisor import Supervisor
from kvrelay.up import cluster_snapshot, waiting_for

READY_S = 180.0
STARTED_S = 300.0  # of processes that may share the machine with tests
_LOOK_S = 0.1
_MAX_LINES = 40


@contextmanager
def running(**options: object) -> Iterator[str]:
    """Yields the URL of a ready cluster started with options such as `prefill=1, decode=1`.

    Raises:
        RuntimeError: it did not get ready; the sentence holds the end of its log.
    """
    port = free_port()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvrelay", "up", f"--port={port}", *flags],
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(os.environ),
            )
        try:
            _wait_until_ready(process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@contextmanager
def started(specs: Sequence[ChildSpec], workers: Sequence[str], url: str) -> Iterator[Supervisor]:
    """Starts processes, among them a gateway at `url`, and yields when it uses all of these workers.

    Raises:
        StartError: one of them ended, or they did not get ready in time; the text says which and why.
    """
    lines = deque[str](maxlen=_MAX_LINES)
    supervisor = Supervisor(specs, lines.append)
    try:
        _wait_until_used(supervisor, list(workers), url, lines)
        yield supervisor
    finally:
        supervisor.stop()


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        if b"KVRelay is ready" in log.read_bytes():
            return
        time.sleep(0.1)
    raise RuntimeError(f"The cluster did not get ready:\n{log.read_text()[-4000:]}")


def _wait_until_used(supervisor: Supervisor, workers: list[str], url: str, lines: deque[str]) -> None:
    deadline, waits_for = time.monotonic() + STARTED_S, "Waiting"
    with connect(url) as client:
        while waits_for:
            for death in supervisor.step():
                raise StartError(f"{death.name} ended with {death.how}: {death.words or ' '.join(lines)}")
            if time.monotonic() > deadline:
                raise StartError(f"The cluster was not ready within {STARTED_S:g} s. {waits_for} {' '.join(lines)}")
            time.sleep(_LOOK_S)
            waits_for = waiting_for(workers, cluster_snapshot(client))
