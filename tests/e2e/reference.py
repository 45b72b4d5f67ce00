"""What a prompt must give: one sequence alone, in one process, without any hand-over."""

from collections.abc import Generator
from pathlib import Path

from kvrelay.checkpoint import resolve
from kvrelay.model.load import load
from kvrelay.types import Batch, RequestKey, SamplingParams, ScheduledSequence, Sequence
from tests.places import CACHE_DIR


class Reference:
    """Generates on a runner of its own, each request once."""

    def __init__(self, model: str, cache_dir: Path, dtype: str = "float32") -> None:
        self._runner = load(
            resolve(model, cache_dir), cache_dir=cache_dir, native_dir=CACHE_DIR, device="cpu", dtype=dtype
        )
        self._known: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = {}

    def check(self, prompt: list[int], params: SamplingParams, got: list[int]) -> None:
        """Fails if `got` is anything else than what the reference gives."""
        assert got == self.tokens(tuple(prompt), params)

    def tokens(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        """What the reference gives, `params.max_tokens` of them."""
        if (prompt, params) not in self._known:
            sequence = Sequence(RequestKey("r", 0), 0, 1, params, list(prompt), len(prompt))
            self._generate(sequence)
            self._known[prompt, params] = sequence.token_ids[len(prompt) :]
        return self._known[prompt, params]

    def _generate(self, sequence: Sequence) -> None:
        most = sequence.num_prompt_tokens + sequence.params.max_tokens
        sequence.block_table = list(range(self._runner.kv_cache.layout.num_blocks(most)))
        for _ in range(sequence.params.max_tokens):
            steps = self._runner.run(Batch((ScheduledSequence(sequence, sequence.num_uncomputed_tokens),)))
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
