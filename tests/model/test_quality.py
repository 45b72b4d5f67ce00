"""Quantised weights and KV say nearly what the dequantised float32 network says, on texts that people wrote."""

from pathlib import Path

import pytest
import torch

from kvrelay.checkpoint import Checkpoint
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.model.forward import Network
from kvrelay.model.load import load
from kvrelay.model.native_network import NativePass
from kvrelay.model.network import TorchPass
from kvrelay.model.packed_weights import Quantization
from kvrelay.model.runner import ModelRunner
from kvrelay.types import Batch, RequestKey, SamplingParams, ScheduledSequence, Sequence

ROOT = Path(__file__).parents[2]
NUM_TEXTS, NUM_CHARS = 50, 500
MAX_DIFFERENCE = 0.005  # of the mean logprob


@pytest.fixture(scope="module")
def texts(smollm2: Checkpoint) -> list[list[int]]:
    """Pieces of this project's own documentation, as token ids."""
    pages = "\n\n".join((ROOT / name).read_text() for name in ("ARCHITECTURE.md", "README.md"))
    pieces = [pages[NUM_CHARS * index : NUM_CHARS * (index + 1)] for index in range(NUM_TEXTS)]
    tokenizer = Tokenizer.load(smollm2)
    return [tokenizer.encode(piece) for piece in pieces]


def runner_of(checkpoint: Checkpoint, cache_dir: Path, **options: object) -> ModelRunner:
    return load(checkpoint, cache_dir=cache_dir, device="cpu", kv_memory_bytes=256 << 20, max_model_len=1024, **options)  # type: ignore[arg-type]


def mean_logprob(runner: ModelRunner, texts: list[list[int]]) -> float:
    """Of every token but the first of each text."""
    total, count = 0.0, 0
    for ids in texts:
        logprobs = _all_logits(runner, ids).double().log_softmax(-1)[:-1]
        total += float(logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        count += len(ids) - 1
    return total / count


def _all_logits(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """float32 `[len(ids), vocab]`."""
    sequence = Sequence(RequestKey("r", 0), 0, 1, SamplingParams(max_tokens=1), list(ids), len(ids))
    sequence.block_table = list(range(runner.kv_cache.layout.num_blocks(len(ids))))
    network: Network = runner.network
    with torch.inference_mode():
        forward = network.begin(Batch((ScheduledSequence(sequence, len(ids)),)), runner.kv_cache)
        for layer in range(network.config.num_layers):
            forward.compute(layer)
        if isinstance(forward, NativePass):
            return forward.network.logits(forward.step.residual)
        assert isinstance(forward, TorchPass)
        return forward.network.logits(forward.hidden)


@pytest.fixture(scope="module")
def exact(smollm2: Checkpoint, cache_dir: Path, texts: list[list[int]]) -> float:
    runner = runner_of(smollm2, cache_dir, kernels="torch", dtype="float32")
    return mean_logprob(runner, texts)


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": Quantization.AUTO, "dtype": "float32"},
        {"quantization": Quantization.AUTO, "dtype": "bfloat16"},
        {"quantization": Quantization.INT8, "dtype": "bfloat16"},
        {"quantization": Quantization.NONE, "dtype": "bfloat16"},
        {"quantization": Quantization.NONE, "dtype": "bfloat16", "kv_cache_dtype": "int8"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_mean_logprob_stays(
    options: dict[str, object], exact: float, smollm2: Checkpoint, cache_dir: Path, texts: list[list[int]]
) -> None:
    found = mean_logprob(runner_of(smollm2, cache_dir, **options), texts)
    assert abs(found / exact - 1) < MAX_DIFFERENCE, f"{found} instead of {exact}"
