"""Real clusters for tests: `kvrelay up` as a user starts it, on free ports, ended with everything it started."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.places import CACHE_DIR

T = TypeVar("T")
READY_S = 90.0
END_S = 60.0  # far more than promised: others may use the cores
DEFAULT_POOLS = {"prefill": 1, "decode": 1, "both": 0}


@dataclass(frozen=True)
class Cluster:
    """A running cluster and where it listens."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def snapshot(self) -> dict[str, Any]:
        """What /cluster says."""
        answer: dict[str, Any] = httpx.get(f"{self.url}/cluster", timeout=10).json()
        return answer

    def workers(self, role: str | None = None) -> list[dict[str, Any]]:
        """The live workers of /cluster, of one role or all."""
        return [worker for worker in self.snapshot()["workers"] if role in (None, worker["role"])]

    def usable(self) -> int:
        """How many workers get requests; 0 as long as the gateway does not answer."""
        try:
            return sum(worker["usable"] for worker in self.workers())
        except httpx.TransportError:
            return 0

    def num_known(self) -> int:
        """How many workers have registered and beaten; 0 as long as the gateway does not answer."""
        try:
            return sum(worker["ledger"] is not None for worker in self.workers())
        except httpx.TransportError:
            return 0

    def idle(self) -> bool:
        """True when no worker holds a block and the gateway has no request, with every ledger conserved."""
        snapshot = self.snapshot()
        ledgers = [worker["ledger"] for worker in snapshot["workers"]]
        return (
            snapshot["num_requests"] == 0
            and all(ledger and ledger["leased"] == ledger["revoked"] == 0 for ledger in ledgers)
            and all(ledger["free"] + ledger["cached"] == ledger["total"] for ledger in ledgers)
        )


def free_port() -> int:
    """A loopback port that nobody listens at now, and none that the kernel may give to somebody else meanwhile."""
    while True:
        port = 10000 + secrets.randbelow(20000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(what: str, check: Callable[[], T], timeout_s: float = 30.0) -> T:
    """Asks until the answer is true; the bound is wide, it only keeps a failing test from hanging."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if answer := check():
            return answer
        time.sleep(0.05)
    raise TimeoutError(f"Waited {timeout_s} s for: {what}.")


@contextmanager
def running(folder: Path, model: Path | str, **options: object) -> Iterator[Cluster]:
    """`kvrelay up` with options such as `prefill=2, dtype="float32"`, ready to serve; its log lies in `folder`."""
    port = free_port()
    num_workers = sum(int(str(options.get(role, default))) for role, default in DEFAULT_POOLS.items())
    name = f"cluster-{port}"
    listen = f"tcp://127.0.0.1:{free_port()}"
    process = _start(folder, name, {"command": "up", "model": model, "port": port, "listen": listen, **options})
    cluster = Cluster(f"http://127.0.0.1:{port}", process, folder / f"{name}.log")
    try:
        wait_for(f"a ready cluster, see {cluster.log}", lambda: _ready(cluster, num_workers), READY_S)
        yield cluster
    finally:
        _stop(process)


@contextmanager
def joined(
    folder: Path, model: Path, workers: Mapping[str, Mapping[str, object]], **shared: object
) -> Iterator[Cluster]:
    """A gateway that all `workers` have joined, usable or not: by name, with their options and the command they run.

    `shared` are options of all of them. Logs lie in `folder`.
    """
    given = {"model": model, "cache_dir": folder / "cache"}
    with overlapping(folder, {"gateway": workers}, workers, given, **shared) as clusters:
        yield clusters["gateway"]


@contextmanager
def overlapping(
    folder: Path,
    members: Mapping[str, Collection[str]],
    workers: Mapping[str, Mapping[str, object]],
    every: Mapping[str, object],
    **shared: object,
) -> Iterator[dict[str, Cluster]]:
    """Gateways by name, each joined by its `members`; a worker may be one of several. See `joined`.

    `every` are options of gateways too.
    """
    addresses = {name: f"tcp://127.0.0.1:{free_port()}" for name in members}
    clusters: dict[str, Cluster] = {}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, listen in addresses.items():
            port = free_port()
            process = _start(folder, name, {**every, "command": "gateway", "port": port, "listen": listen})
            processes.append(process)
            clusters[name] = Cluster(f"http://127.0.0.1:{port}", process, folder / f"{name}.log")
        for name, options in workers.items():
            gateways = ",".join(addresses[cluster] for cluster in members if name in members[cluster])
            processes.append(_start(folder, name, {**every, **shared, "gateways": gateways, "name": name, **options}))
        for name, cluster in clusters.items():
            wait_for(f"all workers, see {folder}", partial(_all_known, cluster, len(members[name])), READY_S)
        yield clusters
    finally:
        codes = ended(processes)
    assert codes == [0] * len(processes)


def _all_known(cluster: Cluster, count: int) -> bool:
    return cluster.num_known() == count


def _start(folder: Path, name: str, options: Mapping[str, object]) -> "subprocess.Popen[bytes]":
    arguments = [_argument(key.replace("_", "-"), value) for key, value in options.items() if key != "command"]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "kvrelay", str(options["command"]), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(),
        )


def ended(processes: "list[subprocess.Popen[bytes]]") -> list[int]:
    """The exit codes of processes that are asked to end; a failing test leaves none behind."""
    for process in processes:
        process.terminate()
    try:
        return [process.wait(END_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def environment() -> dict[str, str]:
    """Without options of whoever runs the tests; native code, which takes a minute to compile, is made once for all."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVRELAY_")}
    return {**inherited, "KVRELAY_NATIVE_DIR": str(CACHE_DIR)}


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _ready(cluster: Cluster, num_workers: int) -> bool:
    if cluster.process.poll() is not None:
        raise RuntimeError(f"The cluster ended:\n{cluster.log.read_text()}")
    try:
        workers = cluster.workers()
    except httpx.TransportError:
        return False
    return len(workers) == num_workers and all(worker["usable"] for worker in workers)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
