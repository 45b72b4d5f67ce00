"""Other systems that `bench.serving` measures in the same run, each started by a script of its own."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from kvrelay.bench.cluster import free_port

READY_S = 600.0  # vLLM compiles for minutes before it answers
PEERS = {"vLLM": "vllm_colocated.sh", "vLLM 1P1D": "vllm_pd.sh"}


@contextmanager
def running_peer(folder: Path, name: str) -> Iterator[str]:
    """The URL of a peer, started by `folder/<its script> PORT` and ended with all that it started.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    port = free_port()
    command = [str(folder / PEERS[name]), str(port)]
    process = subprocess.Popen(
        ["bash", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, name, url)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", name: str, url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with code {process.returncode} before it was ready; start it by hand.")
        try:
            if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise RuntimeError(f"{name} did not answer within {READY_S:g} s; start it by hand.")
