"""Workers that keep KV in int8: the bits of one process, over every transport; others are told apart."""

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
INT8: dict[str, object] = {"kv_cache_dtype": "int8"}
PREFILL: dict[str, object] = {"command": "prefill", "max_batch_tokens": 64}
DECODERS: dict[str, dict[str, object]] = {
    "shm": {"command": "decode", "transport": "shm", **INT8},
    "zmq": {"command": "decode", "transport": "zmq", **INT8},
    "small": {"command": "decode", "transport": "zmq", "block_size": 8, **INT8},
}
OTHER = "float32"
WORKERS: dict[str, dict[str, object]] = {"p": {**PREFILL, **INT8}, **DECODERS, OTHER: {"command": "decode"}}
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def cluster(folder: Path, model: Path) -> Iterator[Cluster]:
    with joined(folder, model, WORKERS, **SETTINGS) as up:
        wait_for("all workers but one to be usable", lambda: up.usable() == len(WORKERS) - 1)
        yield up


def reached(cluster: Cluster, transport: str) -> set[str]:
    """The decode workers that were sent payload by this transport."""
    name = f"{transport}_bytes_received"
    return {worker["name"] for worker in cluster.workers("decode") if worker["counters"].get(name)}


def test_tokens_are_those_of_one_process_over_every_transport(folder: Path, model: Path, cluster: Cluster) -> None:
    """Whole blocks in shared memory and in frames, and converted ones."""
    reference = Reference(str(model), folder / "cache", kv_cache_dtype="int8")
    greedy = [{"prompt": prompt} for prompt in prompts(24, seed=1, vocab_size=VOCAB - 4, longest=300)]
    seeded = [{**request, "temperature": 0.8, "top_p": 0.95, "seed": 7 + n} for n, request in enumerate(greedy)]
    requests: list[dict[str, Any]] = [{**request, "max_tokens": NUM_TOKENS} for request in greedy + seeded]
    for request, token_ids in zip(requests, complete_all(cluster.url, requests), strict=True):
        params = {"temperature": 0.0, "ignore_eos": True, **request}
        del params["prompt"]
        reference.check(request["prompt"], SamplingParams.model_validate(params), token_ids)
    wait_for("every block to come home", cluster.idle)
    wait_for("payload at every decode worker", lambda: reached(cluster, "zmq") | reached(cluster, "shm") == {*DECODERS})
    assert reached(cluster, "shm") == {"shm"}


def test_logprobs_have_the_bits_of_one_process(folder: Path, model: Path, cluster: Cluster) -> None:
    reference = Reference(str(model), folder / "cache", kv_cache_dtype="int8")
    (prompt,) = prompts(1, seed=5, vocab_size=VOCAB - 4)
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    choice = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    expected = [token.logprobs for token in reference.sampled(tuple(prompt), params) if token.logprobs is not None]
    assert choice["logprobs"]["token_logprobs"] == [each.logprob for each in expected]


def test_a_worker_with_kv_of_another_type_is_told_apart_with_its_reason(cluster: Cluster) -> None:
    workers = {worker["name"]: worker for worker in cluster.workers()}
    assert {name: worker["layout"]["dtype"] for name, worker in workers.items()} == {
        **dict.fromkeys(WORKERS, "int8"),
        OTHER: "float32",
    }
    assert [name for name, worker in workers.items() if not worker["usable"]] == [OTHER]
    reason = workers[OTHER]["reason"]
    assert reason.startswith("It fits no prefill worker. The sender's KV layout is 3 layers, ")
    assert "tokens, int8, the receiver's 3 layers" in reason
    assert reason.endswith("tokens, float32; start both with the same --dtype and --kv-cache-dtype.")
    num_rows = 3 * 2 * 2 * 16  # of a block: layers, K and V, heads, tokens
    totals = [workers[name]["ledger"]["total"] for name in ("p", OTHER)]
    assert totals == [2**23 // (num_rows * (16 + 4)), 2**23 // (num_rows * 16 * 4)]
