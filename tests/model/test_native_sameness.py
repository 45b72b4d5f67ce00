"""On native kernels the same token at the same position has the same bits, whatever is computed beside it."""

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from kvrelay.checkpoint import resolve
from kvrelay.model.load import load
from kvrelay.model.packed_weights import Quantization
from tests.model.conftest import Driver, random_ids
from tests.model.test_gguf import VOCAB, write_gguf
from tests.places import CACHE_DIR

LENGTHS = (1, 2, 31, 64, 65, 90, 130)
NUM_TOKENS = 5


@pytest.fixture(params=[("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")], ids="-".join)
def dtypes(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Of the model and of its KV."""
    names: tuple[str, str] = request.param
    return names


@pytest.fixture(params=Quantization)
def driver_of(request: pytest.FixtureRequest, dtypes: tuple[str, str], tmp_path: Path) -> "Drivers":
    write_gguf(tmp_path / "m.gguf", kind=GGMLQuantizationType.Q4_1)
    return Drivers(tmp_path, dtypes, request.param)


class Drivers:
    """Makes drivers of one model in one precision."""

    def __init__(self, folder: Path, dtypes: tuple[str, str], quantization: Quantization) -> None:
        self._folder, self._dtypes, self._quantization = folder, dtypes, quantization

    def __call__(self, block_size: int = 16) -> Driver:
        checkpoint = resolve(str(self._folder / "m.gguf"), self._folder / "cache")
        dtype, kv_cache_dtype = self._dtypes
        runner = load(
            checkpoint,
            cache_dir=self._folder / "cache",
            native_dir=CACHE_DIR,
            device="cpu",
            block_size=block_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            quantization=self._quantization,
            kv_memory_bytes=16 << 20,
        )
        return Driver(runner)


def alone(driver: Driver, prompt: list[int], chunk: int = 1000) -> list[torch.Tensor]:
    """Logits of the first tokens after a prompt, one sequence by itself."""
    sequence = driver.sequence(prompt)
    found = [driver.prefill(sequence, chunk).clone()]
    for _ in range(NUM_TOKENS - 1):
        driver.step((sequence, 1))
        found.append(driver.logits[0].clone())
    return found


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_logits_have_the_same_bits_in_every_batch_chunk_and_block_size(driver_of: "Drivers") -> None:
    driver = driver_of()
    prompts = [random_ids(length, VOCAB, length) for length in LENGTHS]
    expected = [alone(driver, prompt) for prompt in prompts]
    for chunk in (1, 7, 64):
        assert all(same(alone(driver, prompt, chunk), logits) for prompt, logits in zip(prompts, expected, strict=True))
    for block_size in (8, 64):
        assert same(alone(driver_of(block_size), prompts[-1]), expected[-1])
    sequences = [driver.sequence(prompt) for prompt in prompts]
    driver.step(*((sequence, sequence.num_prompt_tokens) for sequence in sequences))  # all prompts at once
    together = [driver.logits.clone()]
    for _ in range(NUM_TOKENS - 1):
        driver.step(*((sequence, 1) for sequence in sequences))
        together.append(driver.logits.clone())
    for row, logits in enumerate(expected):
        assert same([step[row] for step in together], logits)


def test_a_sequence_that_goes_on_after_a_prompt_it_shares_has_the_same_bits(driver_of: "Drivers") -> None:
    """What a prefix cache does, and what preemption and a new start do."""
    driver = driver_of()
    prompt = random_ids(90, VOCAB, 3)
    expected = alone(driver, prompt)
    first, second = driver.sequence(prompt), driver.sequence(prompt)
    driver.prefill(first, 1000)
    second.block_table[:4] = first.block_table[:4]
    second.num_computed_tokens = 64
    assert torch.equal(driver.prefill(second, 1000), expected[0])
    driver.step((second, 1))
    resumed = driver.sequence(second.token_ids[:91])
    assert torch.equal(driver.prefill(resumed, 1000), expected[1])
