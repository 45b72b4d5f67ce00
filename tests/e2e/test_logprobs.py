"""Logprobs through a real cluster: those of the model, of every token, whoever computes it."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.types import SamplingParams
from tests.e2e.cluster import running
from tests.e2e.reference import Reference
from tests.e2e.requests import prompts
from tests.tiny_model import VOCAB, write_tiny_model

ARMS = {"1P1D": {"prefill": 1, "decode": 1}, "both": {"prefill": 0, "decode": 0, "both": 1}}
NUM_TOKENS, NUM_TOP = 6, 3


@pytest.mark.parametrize("arm", ARMS)
def test_every_token_has_the_models_own_logprobs(arm: str, tmp_path: Path) -> None:
    """The first token's logprobs are lost (TensorRT-LLM PR#11727); only list lengths were tested."""
    model = write_tiny_model(tmp_path / "tiny")
    reference = Reference(str(model), tmp_path / "reference")
    (prompt,) = prompts(1, seed=5, vocab_size=VOCAB)
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": NUM_TOP}
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "8M", "cache_dir": tmp_path / "cache", **ARMS[arm]}
    with running(tmp_path, model, **options) as up:
        sent = {**body, "return_token_ids": True, "return_tokens_as_token_ids": True}
        choice = httpx.post(f"{up.url}/v1/completions", json=sent, timeout=60).json()["choices"][0]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=NUM_TOP)
    told, sampled = choice["logprobs"], reference.sampled(tuple(prompt), params)
    assert choice["token_ids"] == [token.token_id for token in sampled]
    expected = [token.logprobs for token in sampled if token.logprobs is not None]
    assert told["token_logprobs"] == [each.logprob for each in expected]
    names = [{f"token_id:{top.token_id}": top.logprob for top in each.top} for each in expected]
    assert told["top_logprobs"] == names
