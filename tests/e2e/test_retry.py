"""A hand-over that cannot succeed is tried once more on another decode worker, and the client does not notice."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from kvrelay.transfer.protocol.piece import HEADER_BYTES, MAGIC
from kvrelay.types import SamplingParams
from tests.e2e.cluster import Cluster, free_port, joined, wait_for
from tests.e2e.reference import Reference
from tests.e2e.requests import prompts
from tests.tiny_model import VOCAB, write_tiny_model
from tests.transfer.proxy import Noise, Proxy

SETTINGS: dict[str, object] = {
    "dtype": "float32",
    "kv_memory": "8M",
    "threads": 1,
    "heartbeat_s": 0.1,
    "transport": "zmq",
}
NUM_TOKENS = 8
MAX_REQUESTS = 20
TO_REPAIR = {"noisy": True, "good": False}
ELSEWHERE = "127.0.0.2"  # an address of this host too


def free_pair() -> int:
    """A loopback port that nobody listens at now, and neither at the next one."""
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            return port


def every_payload() -> Noise:
    """A byte in the first block of every piece is another one; a header lies between its magic and its payload."""
    return Noise(MAGIC, skip=HEADER_BYTES + 100)


@contextmanager
def noisy_line() -> Iterator[dict[str, object]]:
    """What a worker has to be told so that others reach it only through proxies that garble all its payload."""
    first = free_pair()
    with ExitStack() as stack:
        for port in (first, first + 1):  # one for messages, which have no such mark
            proxy = Proxy(f"tcp://127.0.0.1:{port}", f"tcp://{ELSEWHERE}:{port}", every_payload)
            stack.callback(proxy.close)
        yield {"ports": f"{first}-{first + 1}", "advertise": ELSEWHERE}


def counted(cluster: Cluster, name: str, event: str) -> int:
    """What a worker has counted."""
    (counters,) = (worker["counters"] for worker in cluster.workers() if worker["name"] == name)
    count: int = counters.get(event, 0)
    return count


def test_a_hand_over_that_is_damaged_every_time_goes_to_the_other_decode_worker(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, seed=3, ignore_eos=True)
    body = {**params.model_dump(include={"max_tokens", "temperature", "seed", "ignore_eos"}), "return_token_ids": True}
    asked = prompts(MAX_REQUESTS, seed=1, vocab_size=VOCAB - 4, longest=200)
    answered = []
    with noisy_line() as options:
        workers: dict[str, dict[str, object]] = {
            "p": {"command": "prefill"},
            "noisy": {"command": "decode", **options},
            "good": {"command": "decode"},
        }
        with joined(tmp_path, model, workers, **SETTINGS) as up:
            wait_for("all workers to be usable", lambda: up.usable() == len(workers))
            for prompt in asked:
                answer = httpx.post(f"{up.url}/v1/completions", json={**body, "prompt": prompt}, timeout=60)
                assert answer.status_code == 200, answer.text
                answered.append((prompt, answer.json()["choices"][0]["token_ids"]))
                if retries := up.snapshot()["counters"].get("retries", 0):
                    break  # equals take turns, so that happens soon
            wait_for("every block to come home", up.idle)
            assert retries == 1
            wait_for("the damage to be told", lambda: counted(up, "noisy", "rejected_corrupt"))
            assert counted(up, "noisy", "piece_corrupt") >= 2
            assert counted(up, "good", "piece_corrupt") == 0
            (sender,) = up.workers("prefill")
            assert {pair["receiver_name"]: pair["num_repairs"] > 0 for pair in sender["pairs"]} == TO_REPAIR
    reference = Reference(str(model), tmp_path / "cache")
    for prompt, token_ids in answered:
        reference.check(prompt, params, token_ids)
