"""The same tokens, wherever they are computed and whatever runs beside them (float32, the bundled model)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.types import SamplingParams
from tests.e2e.cluster import Cluster, overlapping, wait_for
from tests.e2e.reference import Reference
from tests.e2e.requests import complete_all, prompts

NUM_TOKENS = 12
VOCAB = 40000
WORKERS: dict[str, dict[str, object]] = {
    "p64": {"command": "prefill", "max_batch_tokens": 64},
    "p512": {"command": "prefill", "max_batch_tokens": 512},
    "d0": {"command": "decode"},
    "d1": {"command": "decode"},
    "b": {"command": "decode", "role": "both", "max_batch_tokens": 64},
}
ARMS = {
    "1P1D, chunks of 64": ("p64", "d0"),
    "1P1D, chunks of 512": ("p512", "d0"),
    "2P2D": ("p64", "p512", "d0", "d1"),
    "both": ("b",),
}
SETTINGS: dict[str, object] = {"dtype": "float32", "kv_memory": "600M", "threads": 1}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[dict[str, Cluster]]:
    """By arm; workers are in several, since each takes seconds to start."""
    every: dict[str, object] = {"model": "smollm2-135m", "cache_dir": cache_dir}
    with overlapping(tmp_path_factory.mktemp("sameness"), ARMS, WORKERS, every, **SETTINGS) as up:
        yield up


@pytest.fixture(scope="module")
def reference(cache_dir: Path) -> Reference:
    return Reference("smollm2-135m", cache_dir)


@pytest.mark.timeout(600)  # a quarter of a minute on two free cores; others may use them too
@pytest.mark.parametrize("arm", ARMS)
def test_tokens_are_those_of_one_sequence_alone(arm: str, reference: Reference, clusters: dict[str, Cluster]) -> None:
    asked = prompts(2, seed=1, vocab_size=VOCAB, longest=200) + prompts(1, seed=2, vocab_size=VOCAB, longest=900)
    greedy: list[dict[str, Any]] = [{"prompt": prompt, "max_tokens": NUM_TOKENS} for prompt in asked]
    seeded = [
        {**request, "temperature": 0.8, "top_p": 0.95, "seed": 40 + index} for index, request in enumerate(greedy)
    ]
    others = [
        {"prompt": prompt, "max_tokens": 8, "temperature": 1.0, "seed": index}
        for index, prompt in enumerate(prompts(16, seed=3, vocab_size=VOCAB, longest=60))
    ]
    requests = greedy + seeded
    up, own = clusters[arm], {"cache_salt": arm}  # each arm computes everything itself
    wait_for("all workers to be usable", lambda: up.usable() == len(ARMS[arm]))
    alone = [complete_all(up.url, [request | own])[0] for request in requests]
    crowded = complete_all(up.url, [request | own for request in requests + others])[: len(requests)]
    for request, got, got_in_crowd in zip(requests, alone, crowded, strict=True):
        params = SamplingParams.model_validate(
            {"temperature": 0.0, **{k: v for k, v in request.items() if k != "prompt"}}
        )
        reference.check(request["prompt"], params, got)
        reference.check(request["prompt"], params, got_in_crowd)
