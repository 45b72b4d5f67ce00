"""Drives a ModelRunner step by step as a scheduler would, and keeps the logits of every sampled row."""

import os
from collections.abc import Callable
from pathlib import Path

# Before torch is loaded: threads that spin while they wait slow other processes on the same cores many times over.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from kvrelay.checkpoint import Checkpoint, resolve
from kvrelay.model.load import load
from kvrelay.model.packed_weights import Quantization
from kvrelay.model.runner import ModelRunner
from kvrelay.model.sampler import Sampler
from kvrelay.types import Batch, RequestKey, SampledToken, SamplingParams, ScheduledSequence, Sequence
from tests.places import CACHE_DIR


class RecordingSampler(Sampler):
    """Samples as usual and remembers the logits it was given last."""

    def __init__(self) -> None:
        self.logits = torch.empty(0)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        self.logits = logits.clone()
        return super().sample(logits, sequences)


class Driver:
    """Owns a runner and hands out its blocks, never the same twice and in a scattered order."""

    def __init__(self, runner: ModelRunner) -> None:
        self.sampler = RecordingSampler()
        self.runner = ModelRunner(runner.network, runner.kv_cache, self.sampler)
        generator = torch.Generator().manual_seed(5)
        self.sampled: list[SampledToken | None] = []  # by the last step
        self._free = torch.randperm(runner.kv_cache.num_blocks, generator=generator).tolist()

    @property
    def logits(self) -> torch.Tensor:
        """Of the rows that the last step sampled, `[rows, vocab]`."""
        return self.sampler.logits

    def sequence(self, prompt: list[int], max_tokens: int = 64, temperature: float = 0.0, seed: int = 0) -> Sequence:
        """A new sequence with blocks for all it may become."""
        num_blocks = self.runner.kv_cache.layout.num_blocks(len(prompt) + max_tokens)
        blocks = [self._free.pop() for _ in range(num_blocks)]
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        return Sequence(RequestKey("r", 0), 0, 1, params, list(prompt), len(prompt), blocks)

    def step(self, *shares: tuple[Sequence, int]) -> list[int | None]:
        """Runs one batch, then moves its sequences on as a scheduler does."""
        batch = Batch(tuple(ScheduledSequence(sequence, num_tokens) for sequence, num_tokens in shares))
        layers, sampled = drain(self.runner, batch)
        assert layers == list(range(self.runner.config.num_layers))
        for (sequence, num_tokens), token in zip(shares, sampled, strict=True):
            sequence.num_computed_tokens += num_tokens
            sequence.token_ids += [] if token is None else [token.token_id]
        self.sampled = sampled
        return [None if token is None else token.token_id for token in sampled]

    def prefill(self, sequence: Sequence, chunk: int) -> torch.Tensor:
        """Computes a whole prompt in chunks; gives the logits after its last token."""
        while sequence.num_computed_tokens < sequence.num_prompt_tokens:
            self.step((sequence, min(chunk, sequence.num_prompt_tokens - sequence.num_computed_tokens)))
        return self.logits[0]

    def generate(self, sequences: list[Sequence], num_tokens: int) -> list[list[int]]:
        """Decodes all sequences together."""
        for _ in range(num_tokens):
            self.step(*((sequence, 1) for sequence in sequences))
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def drain(runner: ModelRunner, batch: Batch) -> tuple[list[int], list[SampledToken | None]]:
    """The layers that a step yields, and what it returns."""
    steps, layers = runner.run(batch), []
    while True:
        try:
            layers.append(next(steps))
        except StopIteration as end:
            return layers, end.value


def random_ids(num: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids that are the same in every run."""
    ids: list[int] = torch.randint(0, vocab_size, (num,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@pytest.fixture(scope="session")
def smollm2(cache_dir: Path) -> Checkpoint:
    return resolve("smollm2-135m", cache_dir)


@pytest.fixture(scope="session")
def smollm2_runner(smollm2: Checkpoint, cache_dir: Path) -> ModelRunner:
    return load(
        smollm2,
        cache_dir=cache_dir,
        device="cpu",
        dtype="float32",
        quantization=Quantization.NONE,
        kv_memory_bytes=1 << 30,
    )


@pytest.fixture(params=["auto", "torch"])
def load_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., ModelRunner]:
    """Loads a small model with an own cache folder and few, small blocks, to compute with either kind of kernels."""

    def load_small(path: Path, kv_cache_dtype: str = "auto") -> ModelRunner:
        checkpoint = resolve(str(path), tmp_path / "cache")
        return load(
            checkpoint,
            cache_dir=tmp_path / "cache",
            device="cpu",
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            quantization=Quantization.NONE,
            native_dir=CACHE_DIR,
            kernels=request.param,
            block_size=4,
            kv_memory_bytes=4 << 20,
            max_model_len=256,
        )

    return load_small
