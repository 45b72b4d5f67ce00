"""The bundled model against transformers: logits from the same ids, in float32, through the paged cache."""

import functools
import warnings
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from kvrelay.checkpoint import Checkpoint
from kvrelay.model.load import load
from kvrelay.model.packed_weights import Quantization
from kvrelay.model.runner import ModelRunner
from tests.model.conftest import Driver, random_ids

LENGTHS = (5, 6, 7, 9, 12, 15, 16, 17, 25, 31, 32, 33, 50, 64, 100, 127, 200, 333, 700, 2000)
NUM_GREEDY = 64
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def reference(smollm2: Checkpoint) -> torch.nn.Module:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):  # both are made again and again, for seconds
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        warnings.simplefilter("ignore")  # of another project's loader, not of what is tested
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            smollm2.path.parent,
            gguf_file=smollm2.path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    return model.eval()


@pytest.mark.timeout(400)
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    smollm2_runner: ModelRunner, reference: torch.nn.Module
) -> None:
    driver = Driver(smollm2_runner)
    prompts = [random_ids(length, smollm2_runner.config.vocab_size, length) for length in LENGTHS]
    in_chunks = [driver.sequence(prompt, NUM_GREEDY) for prompt in prompts]
    first = [driver.prefill(sequence, 61 if sequence.num_prompt_tokens < 1000 else 512) for sequence in in_chunks]
    whole = [driver.prefill(driver.sequence(prompt), 4096) for prompt in prompts if len(prompt) < 1000]
    ours = [[row] for row in first]
    for _ in range(NUM_GREEDY - 1):
        driver.step(*((sequence, 1) for sequence in in_chunks))
        for rows, row in zip(ours, driver.logits, strict=True):
            rows.append(row)
    for sequence, rows in zip(in_chunks, ours, strict=True):
        expected = _expected(reference, sequence.token_ids[:-1])
        assert (torch.stack(rows) - expected).abs().max() < TOLERANCE
        if sequence.num_prompt_tokens < 1000:
            assert (whole.pop(0) - expected[0]).abs().max() < TOLERANCE
        _same_greedy(sequence.token_ids[-NUM_GREEDY:], expected)


def _expected(reference: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([token_ids]), logits_to_keep=NUM_GREEDY).logits[0]
    return logits


def _same_greedy(tokens: list[int], logits: torch.Tensor) -> None:
    for token, row in zip(tokens, logits, strict=True):
        if token != int(row.argmax()):
            assert row.max() - row[token] < TOLERANCE
            return  # a tie; whatever follows has another context


def test_bfloat16_ranks_tokens_as_float32_does(
    smollm2: Checkpoint, smollm2_runner: ModelRunner, cache_dir: Path
) -> None:
    options = {"quantization": Quantization.NONE, "kv_memory_bytes": 256 << 20}
    runner = load(smollm2, cache_dir=cache_dir, device="cpu", dtype="bfloat16", **options)  # type: ignore[arg-type]
    prompt = random_ids(150, runner.config.vocab_size, 1)
    exact, rounded = Driver(smollm2_runner), Driver(runner)
    expected = exact.prefill(exact.sequence(prompt), 64)
    logits = rounded.prefill(rounded.sequence(prompt), 64)
    assert (logits - expected).abs().max() < 0.05 * (expected.max() - expected.min())
    assert set(logits.topk(3).indices.tolist()) <= set(expected.topk(10).indices.tolist())
