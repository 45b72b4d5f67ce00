"""What a prompt must give: one sequence alone, in one process, without any hand-over."""

from collections.abc import Generator
from pathlib import Path

from kvrelay.checkpoint import resolve
from kvrelay.model.load import load
from kvrelay.types import Batch, RequestKey, SampledToken, SamplingParams, ScheduledSequence, Sequence
from tests.places import CACHE_DIR


class Reference:
    """Generates on a runner of its own, each request once."""

    def __init__(self, model: str, cache_dir: Path, dtype: str = "float32", kv_cache_dtype: str = "auto") -> None:
        self._runner = load(
            resolve(model, cache_dir),
            cache_dir=cache_dir,
            native_dir=CACHE_DIR,
            device="cpu",
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
        )
        self._known: dict[tuple[tuple[int, ...], SamplingParams], list[SampledToken]] = {}

    def check(self, prompt: list[int], params: SamplingParams, got: list[int]) -> None:
        """Fails if `got` is anything else than what the reference gives."""
        assert got == [token.token_id for token in self.sampled(tuple(prompt), params)]

    def sampled(self, prompt: tuple[int, ...], params: SamplingParams) -> list[SampledToken]:
        """What the reference gives, `params.max_tokens` of them."""
        if (prompt, params) not in self._known:
            self._known[prompt, params] = self._generate(
                Sequence(RequestKey("r", 0), 0, 1, params, list(prompt), len(prompt))
            )
        return self._known[prompt, params]

    def _generate(self, sequence: Sequence) -> list[SampledToken]:
        found: list[SampledToken] = []
        most = sequence.num_prompt_tokens + sequence.params.max_tokens
        sequence.block_table = list(range(self._runner.kv_cache.layout.num_blocks(most)))
        for _ in range(sequence.params.max_tokens):
            steps = self._runner.run(Batch((ScheduledSequence(sequence, sequence.num_uncomputed_tokens),)))
            found += [token for token in _result(steps) if token is not None]
            sequence.num_computed_tokens = len(sequence.token_ids)
            sequence.token_ids.append(found[-1].token_id)
        return found


def _result(steps: Generator[int, None, list[SampledToken | None]]) -> list[SampledToken | None]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            tokens: list[SampledToken | None] = end.value
            return tokens
