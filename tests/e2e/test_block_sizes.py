"""Workers whose KV blocks are of different sizes: the same tokens, or a sentence that says why they cannot pair."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.types import SamplingParams
from tests.e2e.cluster import Cluster, joined, wait_for
from tests.e2e.reference import Reference
from tests.e2e.requests import complete_all, prompts
from tests.tiny_model import VOCAB

SETTINGS: dict[str, object] = {"dtype": "float32", "kv_memory": "8M", "threads": 1, "heartbeat_s": 0.1}
PREFILL: dict[str, object] = {"command": "prefill", "block_size": 16, "max_batch_tokens": 64}
DECODE: dict[str, object] = {"command": "decode"}
DECODERS: dict[str, dict[str, object]] = {
    "small-zmq": {**DECODE, "block_size": 8, "transport": "zmq"},
    "large-zmq": {**DECODE, "block_size": 32, "transport": "zmq"},
    "small-ucx": {**DECODE, "block_size": 8, "transport": "ucx"},
    "large-auto": {**DECODE, "block_size": 32},
}
WORKERS = {"p": PREFILL, **DECODERS}
NUM_TOKENS = 10
MAX_TURNS = 40


@pytest.fixture(scope="module")
def cluster(folder: Path, model: Path) -> Iterator[Cluster]:
    with joined(folder, model, WORKERS, **SETTINGS) as up:
        wait_for("all workers to be usable", lambda: up.usable() == len(WORKERS))
        yield up


@pytest.fixture(scope="module")
def reference(folder: Path, model: Path, cluster: Cluster) -> Reference:
    """Loaded when the cluster is there, so that it finds the weights converted."""
    return Reference(str(model), folder / "cache")


def counted(cluster: Cluster, event: str) -> dict[str, int]:
    """Of each decode worker."""
    return {worker["name"]: worker["counters"].get(event, 0) for worker in cluster.workers("decode")}


def told_of_pairs(cluster: Cluster, what: str) -> dict[str, Any]:
    """What the prefill worker says of each decode worker."""
    (sender,) = cluster.workers("prefill")
    return {pair["receiver_name"]: pair[what] for pair in sender["pairs"]}


def reached(cluster: Cluster, transport: str) -> set[str]:
    """The decode workers that were sent payload by this transport."""
    return {name for name, num_bytes in counted(cluster, f"{transport}_bytes_received").items() if num_bytes}


def reasons(cluster: Cluster) -> dict[str, str]:
    return {worker["name"]: worker["reason"] for worker in cluster.workers()}


def test_tokens_are_those_of_one_process_over_every_transport(cluster: Cluster, reference: Reference) -> None:
    """Where both have shared memory, blocks of another size go by the next best: nobody can write them in place."""
    greedy = [{"prompt": prompt} for prompt in prompts(24, seed=1, vocab_size=VOCAB - 4, longest=300)]
    seeded = [{**request, "temperature": 0.8, "top_p": 0.95, "seed": 7 + n} for n, request in enumerate(greedy)]
    requests: list[dict[str, Any]] = [{**request, "max_tokens": NUM_TOKENS} for request in greedy + seeded]
    for request, token_ids in zip(requests, complete_all(cluster.url, requests), strict=True):
        params = {"temperature": 0.0, "ignore_eos": True, **request}
        del params["prompt"]
        reference.check(request["prompt"], SamplingParams.model_validate(params), token_ids)
    wait_for("every block to come home", cluster.idle)
    by_zmq, by_ucx = {"small-zmq", "large-zmq", "large-auto"}, {"small-ucx"}
    wait_for(
        "payload at every decode worker", lambda: reached(cluster, "zmq") | reached(cluster, "ucx") == set(DECODERS)
    )
    assert [reached(cluster, transport) for transport in ("zmq", "ucx", "shm")] == [by_zmq, by_ucx, set()]
    transports = {**dict.fromkeys(by_zmq, "zmq"), **dict.fromkeys(by_ucx, "ucx")}
    wait_for("what each pair uses to be told", lambda: told_of_pairs(cluster, "transport") == transports)


def test_growing_conversations_hit_the_caches_of_both_sides(cluster: Cluster, reference: Reference) -> None:
    """Each turn goes to some decode worker, so each comes to hold the beginning of one that it has seen before."""
    draw = random.Random(2)
    prompt, known, before = [draw.randrange(VOCAB - 4) for _ in range(45)], 0, counted(cluster, "held_blocks")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for _ in range(MAX_TURNS):
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60).json()
        token_ids = answer["choices"][0]["token_ids"]
        reference.check(prompt, params, token_ids)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == min(known, len(prompt) - 1) // 16 * 16
        known = len(prompt)
        prompt = [*prompt, *token_ids, *(draw.randrange(VOCAB - 4) for _ in range(draw.randint(1, 20)))]
        wait_for("every block to come home", cluster.idle)
        held = counted(cluster, "held_blocks")
        if all(held[name] > before[name] for name in held):
            break
    else:
        pytest.fail(f"{held} after {before}: somebody is always sent everything")
    repairs = told_of_pairs(cluster, "num_repairs")
    assert repairs == dict.fromkeys(DECODERS, 0), "both ends agree about what need not be sent"


def test_what_cannot_be_converted_is_told_apart_with_its_reason(tmp_path: Path, model: Path) -> None:
    workers: dict[str, dict[str, object]] = {
        "p": {**PREFILL, "transport": "shm"},
        "unfit": {**DECODE, "block_size": 24},
        "shared": {**DECODE, "block_size": 8, "transport": "shm"},
    }
    with joined(tmp_path, model, workers, **SETTINGS) as up:
        ready = httpx.get(f"{up.url}/ready")
        found, answer = reasons(up), httpx.post(f"{up.url}/v1/completions", json={"prompt": [1, 2, 3]})
    unfit = "The sender's KV blocks hold 16 tokens, the receiver's 24: one must be a multiple of the other; start both"
    shared = "Blocks of 16 tokens cannot be written into memory that is shared in blocks of 8; start both"
    assert f"It fits no prefill worker. {unfit}" in found["unfit"]
    assert f"It fits no prefill worker. {shared}" in found["shared"]
    assert found["p"].startswith("It fits no decode worker. ")
    assert (ready.status_code, answer.status_code) == (503, 503)
    for sentence in (unfit, shared):
        assert sentence in ready.text
        assert sentence in answer.text
