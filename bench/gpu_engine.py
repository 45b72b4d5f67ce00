"""Decode steps as a worker computes them, from a batch of sequences to their tokens, without messages."""

import statistics
import time
from pathlib import Path

from kvrelay.checkpoint import resolve
from kvrelay.model.load import load
from kvrelay.model.runner import ModelRunner
from kvrelay.types import Batch, RequestKey, SamplingParams, ScheduledSequence, Sequence

_WARM_UP = 3
_STEPS = 30


def load_runner(
    model: Path, cache_dir: Path, device: str, max_rows: int, kv_memory_bytes: int, native_dir: Path | None = None
) -> ModelRunner:
    """The model as a decode worker has it."""
    return load(
        resolve(str(model), cache_dir),
        cache_dir=cache_dir,
        native_dir=native_dir,
        device=device,
        max_decode_rows=max_rows,
        kv_memory_bytes=kv_memory_bytes,
    )


def step_seconds(runner: ModelRunner, batch: int, context: int, steps: int = _STEPS) -> float:
    """The median of some steps of `batch` sequences, about `context` positions each, whose keys and values are zero."""
    needed = runner.kv_cache.layout.num_blocks(context + _WARM_UP + steps)
    params = SamplingParams(max_tokens=_WARM_UP + steps, temperature=1.0)
    sequences = []
    for number in range(batch):
        blocks = list(range(number * needed, (number + 1) * needed))
        known = Sequence(RequestKey(str(number), 0), 0, 0, params, [number] * context, context, blocks)
        known.num_computed_tokens = context - 1
        sequences.append(known)
    took = [_step(runner, sequences) for _ in range(_WARM_UP + steps)]
    return statistics.median(took[_WARM_UP:])


def _step(runner: ModelRunner, sequences: list[Sequence]) -> float:
    begin = time.perf_counter()
    layers = runner.run(Batch(tuple(ScheduledSequence(sequence, 1) for sequence in sequences)))
    while True:
        try:
            next(layers)
        except StopIteration as end:
            sampled = end.value
            break
    took = time.perf_counter() - begin
    for sequence, token in zip(sequences, sampled, strict=True):
        sequence.num_computed_tokens += 1
        sequence.token_ids.append(token.token_id)
    return took
