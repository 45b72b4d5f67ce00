"""Workers on two hosts, over a network that is slow or goes away: right answers or clear errors, and no block lost."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvrelay.types import SamplingParams
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.network import Host, NoNamespaces, cluster_of, two_hosts
from tests.e2e.reference import Reference
from tests.e2e.requests import complete_all, end_all
from tests.tiny_model import VOCAB

BITS_PER_S = 4_000_000
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32
PROMPT_TOKENS = 300  # 0.46 s each on the cable
MAX_TOKENS = 12
LEASE_S = 8.0
END_S = 60.0
CLEAR_ERRORS = {"", "worker_lost", "no_workers", "hand_over_failed"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts(BITS_PER_S))
        except NoNamespaces as reason:
            pytest.skip(f"No network namespaces here: {reason}.")
        yield pair


@pytest.fixture(scope="module", params=["prefill", "decode"])
def apart(request: pytest.FixtureRequest) -> str:
    """The role whose worker is on a host of its own."""
    role: str = request.param
    return role


@pytest.fixture(scope="module")
def cluster(hosts: tuple[Host, Host], folder: Path, model: Path, apart: str) -> Iterator[Cluster]:
    with cluster_of(*hosts, folder, model, apart=apart, kv_memory="16M", lease_s=LEASE_S) as up:
        yield up


@pytest.fixture(scope="module")
def reference(folder: Path, model: Path) -> Reference:
    return Reference(str(model), folder / "cache")


def prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB - 4) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def check(reference: Reference, prompt: list[int], token_ids: list[int]) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    reference.check(prompt, params, token_ids)


def counted(cluster: Cluster, role: str, counter: str) -> int:
    return sum(worker["counters"].get(counter, 0) for worker in cluster.workers(role))


def test_answers_over_a_slow_network_are_right(cluster: Cluster, reference: Reference) -> None:
    asked = prompts(3, seed=1)
    begin = time.monotonic()
    answers = complete_all(cluster.url, [{"prompt": prompt, "max_tokens": MAX_TOKENS} for prompt in asked])
    seconds = time.monotonic() - begin
    for prompt, token_ids in zip(asked, answers, strict=True):
        check(reference, prompt, token_ids)
    wait_for("every block to come home", cluster.idle, END_S)
    num_bytes = len(asked) * PROMPT_TOKENS * BYTES_PER_TOKEN
    assert seconds > 0.8 * 8 * num_bytes / BITS_PER_S  # so it did go over the cable
    wait_for("a heartbeat", lambda: counted(cluster, "decode", "zmq_bytes_received") >= num_bytes)


def test_workers_on_two_hosts_do_not_settle_on_shared_memory(cluster: Cluster) -> None:
    """Both run the same kernel here, so that only the socket that is not reached tells them apart."""
    complete_all(cluster.url, [{"prompt": [1, 2, 3], "max_tokens": 2}])
    assert all(worker["transports"] == ["shm", "zmq"] for worker in cluster.workers())
    wait_for("zmq to be agreed", lambda: counted(cluster, "prefill", "zmq_agreed"))
    assert counted(cluster, "prefill", "shm_agreed") == 0


def until_silent(cluster: Cluster) -> None:
    """For long enough that packets were lost, most often not for so long that the worker counts as dead."""
    wait_for("a late heartbeat", lambda: any(_is_late(worker) for worker in cluster.workers()) or cluster.usable() < 2)


def _is_late(worker: dict[str, Any]) -> bool:
    return bool(worker["heartbeat_age_s"] > 1)


def until_all_ended(cluster: Cluster) -> None:
    wait_for("all requests to end", lambda: cluster.snapshot()["num_requests"] == 0, END_S)


def unplugged(prefill: Host, decode: Host) -> AbstractContextManager[None]:
    return prefill.unplugged()


def kept_apart(prefill: Host, decode: Host) -> AbstractContextManager[None]:
    """What prefill says to decode is lost. If the gateway is with prefill, it sees both all the time."""
    return prefill.cut_off(decode.address)


@pytest.mark.parametrize(
    ("seed", "fault", "until"),
    [(10, unplugged, until_silent), (20, unplugged, until_all_ended), (30, kept_apart, until_all_ended)],
)
def test_a_network_that_goes_away_in_the_middle_of_a_hand_over(
    hosts: tuple[Host, Host],
    apart: str,
    cluster: Cluster,
    reference: Reference,
    seed: int,
    fault: Callable[[Host, Host], AbstractContextManager[None]],
    until: Callable[[Cluster], None],
) -> None:
    decode, prefill = hosts if apart == "prefill" else reversed(hosts)
    asked = prompts(4, seed if apart == "prefill" else seed + 1)
    before = counted(cluster, "decode", "zmq_pieces_received")
    with ThreadPoolExecutor(1) as client:
        ends = client.submit(end_all, cluster.url, asked, max_tokens=MAX_TOKENS, timeout_s=END_S)
        wait_for("pieces on their way", lambda: before < counted(cluster, "decode", "zmq_pieces_received"))
        with fault(prefill, decode):
            until(cluster)
        endings = ends.result()
    assert {ending.error for ending in endings} <= CLEAR_ERRORS
    for prompt, ending in zip(asked, endings, strict=True):
        if not ending.error:
            check(reference, prompt, ending.token_ids)
    wait_for("both workers to be there again", lambda: cluster.usable() == 2, END_S)
    wait_for("every block to come home", cluster.idle, END_S)
    (again,) = prompts(1, seed=seed + 100)
    (answer,) = complete_all(cluster.url, [{"prompt": again, "max_tokens": MAX_TOKENS}])
    check(reference, again, answer)
    wait_for("every block to come home", cluster.idle, END_S)
