"""What the runner asks of a network, whatever that computes with."""

from typing import Protocol

import torch

from kvrelay.model.config import ModelConfig
from kvrelay.model.kv_cache import KVCache
from kvrelay.types import Batch


class ForwardPass(Protocol):
    """One step of a batch under way: its layers in turn, then the logits."""

    def compute(self, layer: int) -> None:
        """The next layer. Its KV of the batch is in the cache afterwards; on a device it is queued to be."""
        ...

    def logits(self) -> torch.Tensor:
        """float32 `[rows, vocab]` after the last layer: a row for each sequence that samples, in the batch's order."""
        ...


class Network(Protocol):
    """A decoder with its weights on one device."""

    @property
    def config(self) -> ModelConfig:
        """What it looks like."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def weights(self) -> str:
        """How they are kept, as far as what it computes depends on it, such as `bf16` or `int4+int8`."""
        ...

    def begin(self, batch: Batch, kv_cache: KVCache) -> ForwardPass:
        """A pass over a batch that is not empty.

        Raises InternalError if a sequence's tokens or blocks do not cover what is scheduled.
        """
        ...
