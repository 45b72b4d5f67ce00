"""Runs one step of a batch through the network: the only thing the compute thread of a worker does."""

from collections.abc import Generator

import torch

from kvrelay.model.config import ModelConfig
from kvrelay.model.forward import ForwardPass, Network
from kvrelay.model.kv_cache import KVCache
from kvrelay.model.logprobs import logprobs_of
from kvrelay.model.sampler import Sampler
from kvrelay.types import Batch, SampledToken


class ModelRunner:
    """Computes batches over one KV cache. Not for several threads at once; it changes no sequence."""

    def __init__(self, network: Network, kv_cache: KVCache, sampler: Sampler) -> None:
        self.network = network
        self.kv_cache = kv_cache
        self.sampler = sampler

    @property
    def config(self) -> ModelConfig:
        """What the network looks like."""
        return self.network.config

    def run(self, batch: Batch) -> Generator[int, None, list[SampledToken | None]]:
        """Computes the scheduled tokens, yielding each layer's index once its KV of this batch is in the cache.

        On a device it need not be there yet, but whoever reads it through the cache waits for it.

        Returns for each scheduled sequence its next token, or None if the step does not reach its last token.
        Closing the generator early leaves only the KV of this batch incomplete. Inference mode is entered anew for
        each piece between two yields, so that it never leaks into the code of the caller's thread.

        Raises InternalError if a sequence does not fit its blocks, or the network gives something else than numbers.
        """
        steps = self._forward(batch)
        while True:
            with torch.inference_mode():
                try:
                    layer = next(steps)
                except StopIteration as end:
                    tokens: list[SampledToken | None] = end.value
                    return tokens
            yield layer

    def _forward(self, batch: Batch) -> Generator[int, None, list[SampledToken | None]]:
        if not batch:
            return []
        forward, num_layers = self.network.begin(batch, self.kv_cache), self.config.num_layers
        # A device works through a queue: it is to compute the next layer while the caller waits for this one's KV.
        num_ahead = 0 if self.kv_cache.staged is None else 1
        for layer in range(num_layers):
            forward.compute(layer)
            self.kv_cache.computed(layer)
            if layer >= num_ahead:
                yield layer - num_ahead
        yield from range(num_layers - num_ahead, num_layers)
        return self._sample(batch, forward)

    def _sample(self, batch: Batch, forward: ForwardPass) -> list[SampledToken | None]:
        sampling = [item.sequence for item in batch.scheduled if item.samples]
        if not sampling:
            return [None] * len(batch.scheduled)
        logits = forward.logits()
        token_ids = self.sampler.sample(logits, sampling)
        tokens = map(SampledToken, token_ids, logprobs_of(logits, sampling, token_ids))
        return [next(tokens) if item.samples else None for item in batch.scheduled]
