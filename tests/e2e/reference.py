"""What a prompt must give: one sequence alone, in one process, without any hand-over."""

from collections.abc import Generator
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
    """Generates on a runner of its own, in float32, each request once."""

    def __init__(self, model: str, cache_dir: Path) -> None:
        self._recorder = _Recorder()
        loaded = load(resolve(model, cache_dir), cache_dir=cache_dir, device="cpu", dtype="float32")
        self.runner = ModelRunner(loaded.network, loaded.kv_cache, self._recorder)
        self._known: dict[tuple[tuple[int, ...], SamplingParams], list[np.ndarray]] = {}

    def check(self, prompt: list[int], params: SamplingParams, got: list[int]) -> None:
        """Fails if `got` leaves the reference anywhere but at a tie; what follows a tie is not compared."""
        assert len(got) == params.max_tokens
        for index, (token, scores) in enumerate(zip(got, self._scores(tuple(prompt), params), strict=True)):
            expected = int(scores.argmax())
            if token != expected:
                distance = float(scores[expected] - scores[token])
                assert distance <= TIE, f"token {index} is {token}, not {expected}; their scores are {distance} apart"
                return

    def _scores(self, prompt: tuple[int, ...], params: SamplingParams) -> list[np.ndarray]:
        """What each token is chosen from."""
        if (prompt, params) not in self._known:
            self._recorder.scores = []
            self._generate(Sequence(RequestKey("r", 0), 0, 1, params, list(prompt), len(prompt)))
            self._known[prompt, params] = self._recorder.scores
        return self._known[prompt, params]

    def _generate(self, sequence: Sequence) -> None:
        most = sequence.num_prompt_tokens + sequence.params.max_tokens
        sequence.block_table = list(range(self.runner.kv_cache.layout.num_blocks(most)))
        for _ in range(sequence.params.max_tokens):
            steps = self.runner.run(Batch((ScheduledSequence(sequence, sequence.num_uncomputed_tokens),)))
            sampled = _result(steps)
            sequence.num_computed_tokens = len(sequence.token_ids)
            sequence.token_ids += [token for token in sampled if token is not None]


def _result(steps: Generator[int, None, list[int | None]]) -> list[int | None]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            tokens: list[int | None] = end.value
            return tokens
