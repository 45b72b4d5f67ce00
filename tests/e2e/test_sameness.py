"""The same tokens, wherever they are computed and whatever runs beside them (float32, the bundled model)."""

from pathlib import Path
from typing import Any

import pytest

from kvrelay.types import SamplingParams
from tests.e2e.cluster import running
from tests.e2e.reference import Reference
from tests.e2e.requests import complete_all, prompts

NUM_TOKENS = 12
VOCAB = 40000
ARMS = {
    "1P1D, chunks of 64": {"prefill": 1, "decode": 1, "max_batch_tokens": 64},
    "1P1D, chunks of 512": {"prefill": 1, "decode": 1, "max_batch_tokens": 512},
    "2P2D": {"prefill": 2, "decode": 2},
    "both": {"prefill": 0, "decode": 0, "both": 1, "max_batch_tokens": 64},
}


@pytest.fixture(scope="module")
def reference(cache_dir: Path) -> Reference:
    return Reference("smollm2-135m", cache_dir)


@pytest.mark.timeout(600)  # a minute on two free cores; others may use them too
@pytest.mark.parametrize("arm", ARMS)
def test_tokens_are_those_of_one_sequence_alone(
    arm: str, reference: Reference, tmp_path: Path, cache_dir: Path
) -> None:
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
    with running(tmp_path, "smollm2-135m", cache_dir=cache_dir, dtype="float32", kv_memory="600M", **ARMS[arm]) as up:
        alone = [complete_all(up.url, [request])[0] for request in requests]
        crowded = complete_all(up.url, requests + others)[: len(requests)]
    for request, got, got_in_crowd in zip(requests, alone, crowded, strict=True):
        params = SamplingParams.model_validate(
            {"temperature": 0.0, **{k: v for k, v in request.items() if k != "prompt"}}
        )
        reference.check(request["prompt"], params, got)
        reference.check(request["prompt"], params, got_in_crowd)
