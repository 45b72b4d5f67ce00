"""The sampler on the native kernel: the very tokens of `sampler.Sampler`, without a sort."""

import math

import torch

from kvrelay.errors import InternalError
from kvrelay.kernels.sampling import Draw, SamplingKernel
from kvrelay.model.sampler import Sampler
from kvrelay.types import Sequence


class NativeSampler(Sampler):
    """Stateless; all rows in one call."""

    def __init__(self, kernel: SamplingKernel) -> None:
        self._kernel = kernel

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """See `Sampler.sample`."""
        token_ids, best = self._kernel(logits.contiguous(), [_draw(sequence) for sequence in sequences])
        for sequence, value in zip(sequences, best, strict=True):
            if not math.isfinite(value):
                raise InternalError(f"Request {sequence.key.request_id}: the network gave {value} as its best logit.")
        return token_ids


def _draw(sequence: Sequence) -> Draw:
    params = sequence.params
    return Draw(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        sample=sequence.sample,
        index=sequence.num_generated_tokens,
    )
