"""Attention over the paged KV cache, for decoding rows and prefill chunks of one packed step."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from kvrelay.kernels.quantized_kv import dequantize_kv, quantize_kv
from kvrelay.model.kv_cache import KVCache
from kvrelay.model.step_plan import DecodeGroup, PrefillChunk, StepPlan


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Writes a layer's new KV into its blocks, then attends over gathered blocks. See `network.Attend`."""

    plan: StepPlan
    kv: torch.Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim] of one layer; int8: see `quantize_kv`

    @classmethod
    def of_layer(cls, plan: StepPlan, kv_cache: KVCache, layer: int) -> "PagedAttention":
        """The attention of one layer in one step."""
        return cls(plan, kv_cache.tensor[layer])

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q `[N, num_heads, head_dim]`, kv `[N, 2 * num_kv_heads, head_dim]` to `[N, num_heads * head_dim]`."""
        self._store(kv)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self.plan.decode:
            out.index_copy_(0, group.rows, self._decode(group, q))
        for chunk in self.plan.prefill:
            out[chunk.rows] = self._prefill(chunk, q[chunk.rows])
        return out.flatten(1)

    def _store(self, kv: torch.Tensor) -> None:
        if self.plan.begun_blocks.numel():
            self.kv.index_fill_(0, self.plan.begun_blocks, 0)
        rows = quantize_kv(kv) if self.kv.dtype == torch.int8 else kv
        self.kv.view(-1, rows.shape[-1]).index_copy_(0, self.plan.written, rows.reshape(-1, rows.shape[-1]))

    def _decode(self, group: DecodeGroup, q: torch.Tensor) -> torch.Tensor:
        num_rows, num_kv_heads, head_dim = len(group.rows), self.kv.shape[2], q.shape[-1]
        keys, values = self._gather(group.strips, num_rows, q.dtype)
        # The query heads that share a KV head stand where several query positions would.
        grouped = q.index_select(0, group.rows).view(num_rows, num_kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
        return out.reshape(num_rows, -1, head_dim)

    def _prefill(self, chunk: PrefillChunk, q: torch.Tensor) -> torch.Tensor:
        keys, values = self._gather(chunk.strips, 1, q.dtype)
        stop = chunk.start + q.shape[0]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[:, :, :stop],
            values[:, :, :stop],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _gather(self, strips: torch.Tensor, num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[num_rows, num_kv_heads, positions, head_dim]` of whole blocks, in `dtype`."""
        _, _, num_kv_heads, block_size, row_size = self.kv.shape
        gathered = self.kv.view(-1, block_size * row_size).index_select(0, strips)
        rows = gathered.view(num_rows, 2, num_kv_heads, -1, row_size)
        keys, values = (dequantize_kv(rows, dtype) if rows.dtype == torch.int8 else rows).unbind(1)
        return keys, values
