"""The sampler on Triton's kernel: the tokens of `sampler.Sampler`, chosen where the logits are."""

import numpy as np
import torch

from kvrelay.errors import InternalError
from kvrelay.kernels.gumbel import RowSampling, sample_tokens
from kvrelay.model.device_arrays import on_device
from kvrelay.model.sampler import Sampler
from kvrelay.types import Sequence


class TritonSampler(Sampler):
    """Stateless; only the ids come to the host, which waits for nothing else."""

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """See `Sampler.sample`."""
        out = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
        sample_tokens(logits, RowSampling(*on_device(_settings(sequences), logits.device)), out)
        token_ids: list[int] = out.tolist()
        for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            if token_id < 0:
                best = logits[row].max().item()
                raise InternalError(f"Request {sequence.key.request_id}: the network gave {best} as its best logit.")
        return token_ids


def _settings(sequences: list[Sequence]) -> list[np.ndarray]:
    """The fields of `RowSampling`, in their order."""
    params = [sequence.params for sequence in sequences]
    return [
        np.array([each.temperature for each in params], np.float64),
        np.array([each.top_k for each in params], np.int32),
        np.array([each.top_p for each in params], np.float64),
        np.array([each.min_p for each in params], np.float64),
        np.array([each.seed for each in params], np.uint64).view(np.int64),
        np.array([sequence.sample for sequence in sequences], np.int64),
        np.array([sequence.num_generated_tokens for sequence in sequences], np.int64),
    ]
