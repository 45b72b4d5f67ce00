"""On native kernels the same token at the same position has the same bits, whatever is computed beside it."""

from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType

from kvrelay.checkpoint import resolve
from kvrelay.model.load import load
from kvrelay.model.packed_weights import Quantization
from tests.model.conftest import Driver, random_ids
from tests.model.sameness import alone, same, shared_and_resumed, together
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


def test_logits_have_the_same_bits_in_every_batch_chunk_and_block_size(driver_of: "Drivers") -> None:
    driver = driver_of()
    prompts = [random_ids(length, VOCAB, length) for length in LENGTHS]
    expected = [alone(driver, prompt, NUM_TOKENS) for prompt in prompts]
    for chunk in (1, 7, 64):
        assert all(map(same, (alone(driver, prompt, NUM_TOKENS, chunk) for prompt in prompts), expected))
    for block_size in (8, 64):
        assert same(alone(driver_of(block_size), prompts[-1], NUM_TOKENS), expected[-1])
    assert all(map(same, together(driver, prompts, NUM_TOKENS), expected))


def test_a_sequence_that_goes_on_after_a_prompt_it_shares_has_the_same_bits(driver_of: "Drivers") -> None:
    """What a prefix cache does, and what preemption and a new start do."""
    driver = driver_of()
    prompt = random_ids(90, VOCAB, 3)
    assert same(shared_and_resumed(driver, prompt, 64), alone(driver, prompt, 2))
