"""A cluster for a benchmark: `kvrelay up` on a free port, ended with everything it started."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_S = 180.0


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
