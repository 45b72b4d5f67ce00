"""The next token of each row of logits by Gumbel-max: the native kernel. Its plain twin is `model/sampler.py`.

Nothing is sorted, and noise is computed in full only for tokens that may win, but every comparison that decides is made
in float64, as the twin makes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.kernels.native_library import NativeLibrary

_SIGNED = 2**63


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row is sampled with; see `SamplingParams`. `temperature` 0 is greedy.

    The noise of a token is a function of `seed`, `sample`, `index` (of the token in its answer) and the token's id.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample: int
    index: int


class SamplingKernel:
    """The native kernel on `num_threads` threads, which share the rows."""

    def __init__(self, native: NativeLibrary, num_threads: int) -> None:
        self.num_threads = num_threads
        self._sample = native.function("kvrelay_sample", "piippppi")

    def __call__(self, logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
        """For each row of logits, float32 `[rows, vocab]`, the next token and the largest logit.

        Equal candidates go to the lowest id. Where the largest logit is no finite number, the token is the first that
        has it. Raises ValueError if logits are something else or there are not as many draws.
        """
        fits = logits.dim() == 2 and logits.dtype == torch.float32 and logits.is_contiguous() and logits.is_cpu
        if not fits or logits.shape[1] == 0 or len(logits) != len(draws):
            raise ValueError(
                f"{len(draws)} tokens cannot be drawn from {str(logits.dtype).removeprefix('torch.')} "
                f"{list(logits.shape)} on {logits.device}; expected float32 [rows, vocab], contiguous and on the CPU."
            )
        reals = torch.tensor([(draw.temperature, draw.min_p, draw.top_p) for draw in draws], dtype=torch.float64)
        integers = torch.tensor(
            [(draw.top_k, *map(_signed, (draw.seed, draw.sample, draw.index))) for draw in draws], dtype=torch.int64
        )
        tokens, best = torch.empty(len(draws), dtype=torch.int64), torch.empty(len(draws))
        self._sample(
            logits.data_ptr(),
            *logits.shape,
            *(each.data_ptr() for each in (reals, integers, tokens, best)),
            self.num_threads,
        )
        return tokens.tolist(), best.tolist()


def _signed(word: int) -> int:
    """The same 64 bits, as torch has them."""
    return (word + _SIGNED) % (2 * _SIGNED) - _SIGNED
