"""The prefix cache from outside: what is computed, what is told, and that the tokens are the same."""

import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, running, wait_for
from tests.e2e.requests import complete_all, prompts
from tests.tiny_model import VOCAB

BLOCK_SIZE = 16
NUM_TOKENS = 8
SETTINGS: dict[str, object] = {"dtype": "float32", "heartbeat_s": 0.1}
ARMS: dict[str, dict[str, int]] = {"1P1D": {"prefill": 1, "decode": 1}, "both": {"prefill": 0, "decode": 0, "both": 1}}


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cluster(arm: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With blocks for little more than one full context, so that cached ones are evicted all the time."""
    folder = tmp_path_factory.mktemp("cluster")
    options = {**SETTINGS, "cache_dir": folder / "cache", "kv_memory": "2M", **ARMS[arm]}
    with running(folder, model, **options) as up:
        yield up


def ask(cluster: Cluster, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """The token ids of an answer, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{cluster.url}/v1/completions", json={**body, **fields}, timeout=60)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), NUM_TOKENS)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= cached < len(prompt)
    return response.json()["choices"][0]["token_ids"], cached


def new_prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB - 4) for _ in range(length)]


def alike() -> list[dict[str, Any]]:
    """Requests whose prompts begin like others."""
    stems = prompts(3, seed=8, vocab_size=VOCAB - 4, longest=500)
    return [
        {"prompt": [*stems[seed % 3][: 40 * (seed % 13)], *new_prompt(seed, 1 + seed % 40)], "max_tokens": NUM_TOKENS}
        for seed in range(60)
    ]


@pytest.fixture(scope="module")
def uncached(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What a worker without a cache answers to them; it keeps nothing."""
    folder = tmp_path_factory.mktemp("uncached")
    options = {**SETTINGS, "cache_dir": folder / "cache", **ARMS["both"], "prefix_cache": False}
    with running(folder, model, **options) as plain:
        answers = complete_all(plain.url, alike())
        assert ask(plain, alike()[-1]["prompt"])[1] == 0
        wait_for(
            "nothing to be left",
            lambda: all(each["ledger"]["free"] == each["ledger"]["total"] for each in plain.workers()),
        )
    return answers


def beaten(cluster: Cluster) -> None:
    """Returns after every worker has been heard again."""
    begin = time.monotonic()

    def heard() -> bool:
        since_s = time.monotonic() - begin
        return all(worker["heartbeat_age_s"] < since_s for worker in cluster.workers())

    wait_for("a heartbeat of every worker", heard)


def counted(cluster: Cluster, event: str, role: str | None = None) -> int:
    """What workers counted, as soon as it stays the same while they are heard again and again."""

    def told() -> int:
        beaten(cluster)
        return sum(worker["counters"].get(event, 0) for worker in cluster.workers(role))

    return wait_for(f"a steady count of {event}", lambda: same(told() for _ in range(4)))[0]


def same(counts: Iterable[int]) -> list[int]:
    """The count if all are one, else nothing."""
    found = set(counts)
    return list(found) if len(found) == 1 else []


def test_the_same_prompt_twice_is_computed_once(cluster: Cluster) -> None:
    for seed, length, expected in ((1, 100, 96), (2, 96, 80), (3, 16, 0), (4, 17, 16)):
        first, second = (ask(cluster, new_prompt(seed, length)) for _ in range(2))
        assert first[0] == second[0]
        assert (first[1], second[1]) == (0, expected)
    metrics = httpx.get(f"{cluster.url}/metrics").text
    assert "\nkvrelay_cached_tokens_total 192.0\n" in metrics


def test_another_salt_is_another_cache(cluster: Cluster) -> None:
    prompt = new_prompt(5, 50)
    answers = [ask(cluster, prompt, cache_salt=salt) for salt in ("a", "b", "", "a")]
    assert [cached for _, cached in answers] == [0, 0, 0, 48]
    assert len({tuple(token_ids) for token_ids, _ in answers}) == 1


def test_a_conversation_of_eight_turns_computes_only_what_is_new(cluster: Cluster, arm: str) -> None:
    """And says so: on the worker that computes prompts, cached and computed tokens are all there are."""
    role, rows = ("prefill", 0) if arm == "1P1D" else ("both", NUM_TOKENS - 1)
    prompt, known, expected = new_prompt(6, 70), 0, counted(cluster, "computed_tokens", role)
    for turn in range(8):
        answer, cached = ask(cluster, prompt)
        assert cached == min(known, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        expected += len(prompt) - cached + rows
        assert ask(cluster, prompt, cache_salt=f"turn {turn}")[0] == answer
        expected += len(prompt) + rows
        known = len(prompt) + rows
        prompt = [*prompt, *answer, *new_prompt(60 + turn, 30)]
    assert counted(cluster, "computed_tokens", role) == expected


def test_a_decode_worker_is_not_sent_what_it_holds(cluster: Cluster, arm: str) -> None:
    """Of an answer too, which only the decode worker has computed: that part is computed again, but not sent."""
    if arm != "1P1D":
        pytest.skip("nothing is handed over in a colocated worker")
    prompt = new_prompt(7, 60)
    answer, _ = ask(cluster, prompt)
    before = counted(cluster, "held_blocks")
    assert ask(cluster, [*prompt, *answer, 1, 2, 3])[1] == 48
    assert counted(cluster, "held_blocks") - before == 4  # 67 tokens have KV there


def test_answers_are_the_same_with_and_without_a_cache_whatever_else_runs(
    cluster: Cluster, uncached: list[list[int]]
) -> None:
    """A read of blocks already released and reused shows here: there are few, and most prompts begin alike."""
    assert [complete_all(cluster.url, alike()) for _ in range(2)] == [uncached, uncached]
    wait_for("every block to come home", cluster.idle)
    assert all(worker["ledger"]["cached"] > 0 for worker in cluster.workers())
