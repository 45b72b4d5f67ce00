"""What a prompt must give: one sequence alone, in one process, without any hand-over."""

from pathlib import Path

import numpy as np
import torch

from kvrelay.checkpoint import resolve
from kvrelay.model.load import load
from kvrelay.model.noise import gumbel_noise
from kvrelay.model.runner import ModelRunner
from kvrelay.model.sampler import Sampler, filtered_logits
from kvrelay.types import Batch, RequestKey, SamplingParams, ScheduledSequence, Sequence

TIE = 1e-3  # two candidates closer than this may come in either order (float32 sums in another order)


class _Recorder(Sampler):
    """Keeps the scores from which each token was chosen."""

    def __init__(self) -> None:
        self.scores: list[np.ndarray] = []

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        for row, sequence in zip(logits.float().numpy(), sequences, strict=True):
            self.scores.append(_scores(row, sequence))
        return super().sample(logits, sequences)


def _scores(row: np.ndarray, sequence: Sequence) -> np.ndarray:
    params = sequence.params
    if params.temperature == 0.0:
        return row.copy()
    noise = gumbel_noise(params.seed, sequence.sample, sequence.num_generated_tokens, len(row))
    scores: np.ndarray = filtered_logits(row, params) + noise
    return scores


class Reference:
    """Generates on a runner of its own, in float32."""

    def __init__(self, model: str, cache_dir: Path) -> None:
        self._recorder = _Recorder()
        loaded = load(resolve(model, cache_dir), cache_dir=cache_dir, device="cpu", dtype="float32")
        self.runner = ModelRunner(loaded.network, loaded.kv_cache, self._recorder)

    def check(self, prompt: list[int], params: SamplingParams, got: list[int]) -> None:
        """Fails if `got` leaves the reference anywhere but at a tie; what follows a tie is not compared."""
        sequence = Sequence(RequestKey("r", 0), 0, 1, params, list(prompt), len(prompt))
        layout = self.runner.kv_cache.layout
        sequence.block_table = list(range(layout.num_blocks(len(prompt) + params.max_tokens)))
        assert len(got) == params.max_tokens
        for index, token in enumerate(got):
            expected, scores = self._step(sequence)
            if token != expected:
                distance = abs(float(scores[token]) - float(scores[expected]))
                assert distance <= TIE, f"token {index} is {token}, not {expected}; their scores are {distance} apart"
                return
            sequence.token_ids.append(token)

    def _step(self, sequence: Sequence) -> tuple[int, np.ndarray]:
        self._recorder.scores.clear()
        steps = self.runner.run(Batch((ScheduledSequence(sequence, sequence.num_uncomputed_tokens),)))
        while True:
            try:
                next(steps)
            except StopIteration as result:
                sequence.num_computed_tokens = len(sequence.token_ids)
                return result.value[0], self._recorder.scores[0]
