"""A decode step of a random Llama model, of KVRelay's kernels alone, without scheduler and messages."""

from dataclasses import dataclass

import torch

from kvrelay.bench.gpu_costs import Decoder
from kvrelay.kernels.gumbel import RowSampling, sample_tokens
from kvrelay.kernels.matmul import matmul
from kvrelay.kernels.norm_and_gate import add_rms_norm, silu_and_mul
from kvrelay.kernels.paged_attention import decode_attention
from kvrelay.kernels.rope import rope_and_store

BLOCK_SIZE = 16
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The KV of one layer for sequences of equal length, their blocks anywhere."""

    kv: torch.Tensor
    block_tables: torch.Tensor
    num_positions: torch.Tensor
    slots: torch.Tensor  # of the last positions

    @classmethod
    def random(cls, decoder: Decoder, batch: int, context: int, device: torch.device) -> "PagedContext":
        """Normal keys and values, bfloat16."""
        width = -(-context // BLOCK_SIZE)
        shape = (batch * width, 2, decoder.num_kv_heads, BLOCK_SIZE, decoder.head_dim)
        kv = torch.randn(shape, dtype=torch.bfloat16, device=device)
        tables = torch.randperm(batch * width, device=device).view(batch, width)
        last = tables[:, (context - 1) // BLOCK_SIZE] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        counts = torch.full((batch,), context, dtype=torch.int32, device=device)
        return cls(kv, tables.int(), counts, last)


class RandomStep:
    """Weights, KV and buffers of a step of `batch` sequences at `context` positions; calling it makes the step."""

    def __init__(self, decoder: Decoder, batch: int, context: int, device: torch.device) -> None:
        self._decoder = decoder
        self._batch = batch

        def weight(outputs: int, inputs: int) -> torch.Tensor:
            return torch.randn((outputs, inputs), dtype=torch.bfloat16, device=device).mul_(inputs**-0.5)

        self._layers = [
            {name: weight(*shape) for name, shape in decoder.projections.items()} for _ in range(decoder.num_layers)
        ]
        self._contexts = [PagedContext.random(decoder, batch, context, device) for _ in range(decoder.num_layers)]
        self._embedding = weight(decoder.vocab, decoder.hidden)
        self._norm = torch.ones(decoder.hidden, device=device)
        angles = torch.rand((context, decoder.head_dim), device=device)
        self._tables = (angles.cos(), angles.sin())
        self._positions = torch.full((batch,), context - 1, dtype=torch.int64, device=device)
        self._sampling = sampling(batch, device)
        self.token_ids = torch.zeros(batch, dtype=torch.int64, device=device)

    def __call__(self) -> None:
        """Embeds `token_ids`, and puts the next ones in their place."""
        hidden = self._embedding[self.token_ids].float()
        delta: torch.Tensor | None = None
        for weights, context in zip(self._layers, self._contexts, strict=True):
            delta = self._layer(hidden, delta, weights, context)
        logits = self._new(self._decoder.vocab, torch.float32)
        matmul(self._normed(hidden, delta), self._embedding, None, logits)
        sample_tokens(logits, self._sampling, self.token_ids)

    def _layer(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        weights: dict[str, torch.Tensor],
        context: PagedContext,
    ) -> torch.Tensor:
        size = self._decoder
        qkv = self._product(self._normed(hidden, delta), weights["qkv"])
        q = self._new(size.num_heads * size.head_dim).view(self._batch, size.num_heads, size.head_dim)
        rope_and_store(qkv, self._positions, self._tables, None, _EPS, context.slots, q, context.kv)
        attended = torch.empty_like(q)
        decode_attention(q, context.kv, context.block_tables, context.num_positions, attended)
        normed = self._normed(hidden, self._product(attended.flatten(1), weights["output"]))
        gated = self._new(size.intermediate)
        silu_and_mul(self._product(normed, weights["gate_up"]), gated)
        return self._product(gated, weights["down"])

    def _normed(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        out = self._new(self._decoder.hidden)
        add_rms_norm(hidden, delta, self._norm, _EPS, out)
        return out

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = self._new(len(weight))
        matmul(x, weight, None, out)
        return out

    def _new(self, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty((self._batch, size), dtype=dtype, device=self._norm.device)


def sampling(batch: int, device: torch.device, top_p: float = 1.0) -> RowSampling:
    """Rows of temperature 1."""

    def real(value: float) -> torch.Tensor:
        return torch.full((batch,), value, dtype=torch.float64, device=device)

    whole = torch.arange(batch, device=device)
    return RowSampling(real(1.0), torch.zeros_like(whole).int(), real(top_p), real(0.0), whole, whole, whole)
