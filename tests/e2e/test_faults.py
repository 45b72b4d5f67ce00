"""Processes that die, clients that leave, an end in the middle of streams: every request ends, nothing is lost."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.cluster import Cluster, running, wait_for
from tests.e2e.storm import Outcome, Storm
from tests.tiny_model import VOCAB

END_S = 30.0  # the promise is 5 s; the bound is wide, since other tests may share the cores


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with running(folder, model, cache_dir=folder / "cache", prefill=2, decode=2, kv_memory="8M") as up:
        yield up


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker of each role. The last test that uses it ends it."""
    folder = tmp_path_factory.mktemp("pair")
    with running(folder, model, cache_dir=folder / "cache", prefill=1, decode=1) as up:
        yield up


def blow(cluster: Cluster, storm: Storm) -> Outcome:
    return asyncio.run(storm.blow(cluster.url))


def test_cancelled_requests_harm_no_others_and_leave_no_block_behind(cluster: Cluster) -> None:
    outcome = blow(cluster, Storm(count=200, at_once=32, cancel_share=1 / 3, seed=1, vocab_size=VOCAB - 4))
    assert outcome.failed == []
    assert outcome.completed + outcome.cancelled == 200
    wait_for("every block to come home", cluster.idle)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_ends_its_requests_and_the_cluster_recovers(cluster: Cluster, role: str) -> None:
    victim = cluster.workers(role)[0]
    killed_at: list[float] = []

    def kill() -> None:
        wait_for("work at the victim", lambda: cluster.snapshot()["num_requests"] >= 1)
        os.kill(victim["pid"], signal.SIGKILL)
        killed_at.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = blow(cluster, Storm(count=400, at_once=24, cancel_share=0, seed=2, vocab_size=VOCAB - 4))
    killer.join(END_S)
    assert outcome.completed + len(outcome.failed) == 400
    assert outcome.completed > 0
    wait_for("a new process in its place", lambda: _replaced(cluster, victim), END_S)
    wait_for("every block to come home", cluster.idle, END_S)
    again = blow(cluster, Storm(count=20, at_once=8, cancel_share=0, seed=3, vocab_size=VOCAB - 4))
    assert again.failed == []


def _replaced(cluster: Cluster, victim: dict[str, object]) -> bool:
    named = [worker for worker in cluster.workers() if worker["name"] == victim["name"]]
    return len(named) == 1 and named[0]["pid"] != victim["pid"]


def test_without_workers_requests_are_refused_and_a_late_worker_is_welcome(pair: Cluster) -> None:
    victim = pair.workers("decode")[0]
    os.kill(victim["pid"], signal.SIGKILL)
    wait_for("the loss to be known", lambda: httpx.get(f"{pair.url}/ready").status_code == 503)
    answer = httpx.post(f"{pair.url}/v1/completions", json={"prompt": [1], "max_tokens": 2}, timeout=30)
    assert answer.status_code in (200, 503)  # 200 if the new worker was faster
    wait_for("the worker to be back", lambda: httpx.get(f"{pair.url}/ready").status_code == 200, 60)
    answer = httpx.post(f"{pair.url}/v1/completions", json={"prompt": [1], "max_tokens": 2}, timeout=30)
    assert answer.status_code == 200


def test_ctrl_c_ends_everything_with_streams_open(pair: Cluster) -> None:
    processes = psutil.Process(pair.process.pid).children(recursive=True)
    body = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        pair.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    pair.process.wait(END_S)
    assert "error" in rest[-1]
    assert "[DONE]" not in rest[-1]
    assert [process for process in processes if process.is_running()] == []
