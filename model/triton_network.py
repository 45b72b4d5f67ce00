"""The decoder on Triton's kernels, for GPUs: the same network as `network.TorchNetwork`.

Every kernel gives a row the same bits whatever other rows are beside it, as those of `native_network` do on CPUs.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.kernels.norm_and_gate import add_rms_norm, silu_and_mul
from kvrelay.kernels.paged_attention import decode_attention, prefill_attention
from kvrelay.kernels.rope import rope_and_store
from kvrelay.model import tensors as names
from kvrelay.model.config import ModelConfig
from kvrelay.model.device_arrays import on_device
from kvrelay.model.kv_cache import KVCache
from kvrelay.model.layers import RotaryEmbedding
from kvrelay.model.triton_plan import TritonPlan, plan_triton, with_arrays
from kvrelay.model.triton_weights import Matrix, MatrixMaker, TritonWeights
from kvrelay.types import Batch


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; weights of norms are float32."""

    attention_norm: torch.Tensor
    qkv: Matrix
    head_norms: tuple[torch.Tensor, torch.Tensor] | None  # of queries and keys
    output: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(slots=True)
class Residual:
    """The residual stream of N rows, float32 `[N, hidden]`, and what is still to be added to it, of any type."""

    stream: torch.Tensor
    delta: torch.Tensor | None = None

    def rows(self, indexes: torch.Tensor) -> "Residual":
        """A copy of some rows."""
        return Residual(
            self.stream.index_select(0, indexes), None if self.delta is None else self.delta.index_select(0, indexes)
        )


@dataclass(frozen=True, slots=True)
class TritonNetwork:
    """See `forward.Network`."""

    config: ModelConfig
    device: torch.device
    weights: str
    dtype: torch.dtype  # of everything but the residual stream and logits
    embedding: Matrix
    rotary: RotaryEmbedding
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: Matrix

    def begin(self, batch: Batch, kv_cache: KVCache) -> "TritonPass":
        """See `forward.Network`."""
        return self.begin_planned(plan_triton(batch, kv_cache.layout, kv_cache.num_blocks), kv_cache)

    def begin_planned(self, plan: TritonPlan[np.ndarray], kv_cache: KVCache) -> "TritonPass":
        """A pass over the batch that this is the plan of."""
        on_gpu = with_arrays(plan, on_device(plan.arrays, self.device))
        if len(plan.begun_blocks):  # see `kv_cache`
            kv_cache.tensor.index_fill_(1, on_gpu.begun_blocks, 0)
        return TritonPass(self, kv_cache, on_gpu, self.embed(on_gpu.token_ids))

    def embed(self, token_ids: torch.Tensor) -> Residual:
        """The residual stream before the first layer."""
        return Residual(self.embedding.rows(token_ids))

    def compute(self, layer: int, residual: Residual, plan: TritonPlan[torch.Tensor], kv: torch.Tensor) -> None:
        """One layer, whose KV is `kv`."""
        weights, dtype = self.layers[layer], self.dtype
        q = self._heads(self._normed(residual, weights.attention_norm), weights, plan, kv)
        residual.delta = _product(_attended(q, plan, kv).flatten(1), weights.output, dtype)
        gate_up = _product(self._normed(residual, weights.mlp_norm), weights.gate_up, dtype)
        gated = torch.empty((len(gate_up), self.config.intermediate_size), dtype=dtype, device=self.device)
        silu_and_mul(gate_up, gated)
        residual.delta = _product(gated, weights.down, dtype)

    def logits_into(self, residual: Residual, out: torch.Tensor) -> None:
        """Puts the logits of all rows after the last layer into `out`, float32 `[rows, vocab]`."""
        self.lm_head.multiply(self._normed(residual, self.norm), out)

    def _normed(self, residual: Residual, weight: torch.Tensor) -> torch.Tensor:
        """Adds what is still to be added."""
        out = torch.empty(residual.stream.shape, dtype=self.dtype, device=self.device)
        add_rms_norm(residual.stream, residual.delta, weight, self.config.rms_norm_eps, out)
        return out

    def _heads(
        self, x: torch.Tensor, weights: LayerWeights, plan: TritonPlan[torch.Tensor], kv: torch.Tensor
    ) -> torch.Tensor:
        """Rotated queries `[N, num_heads, head_dim]`; keys and values are written into their blocks."""
        config = self.config
        qkv = _product(x, weights.qkv, self.dtype)
        q = torch.empty((len(x), config.num_heads, config.head_dim), dtype=self.dtype, device=self.device)
        tables, norms = (self.rotary.cos, self.rotary.sin), weights.head_norms
        rope_and_store(qkv, plan.positions, tables, norms, config.rms_norm_eps, plan.slots, q, kv)
        return q


def _product(x: torch.Tensor, weight: Matrix, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((len(x), weight.num_outputs), dtype=dtype, device=x.device)
    weight.multiply(x, out)
    return out


def _attended(q: torch.Tensor, plan: TritonPlan[torch.Tensor], kv: torch.Tensor) -> torch.Tensor:
    out, num_decoding = torch.empty_like(q), len(plan.decode_counts)
    if num_decoding:
        decode_attention(q[:num_decoding], kv, plan.decode_tables, plan.decode_counts, out[:num_decoding])
    if num_decoding < len(q):
        prefill_attention(
            q[num_decoding:], kv, plan.chunk_tables, plan.chunk_starts, plan.chunk_counts, plan.max_queries,
            out[num_decoding:],
        )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class TritonPass:
    """See `forward.ForwardPass`."""

    network: TritonNetwork
    kv_cache: KVCache
    plan: TritonPlan[torch.Tensor]
    residual: Residual

    def compute(self, layer: int) -> None:
        """The next layer."""
        self.network.compute(layer, self.residual, self.plan, self.kv_cache.tensor[layer])

    def logits(self) -> torch.Tensor:
        """float32 `[rows, vocab]` of what samples."""
        network, rows = self.network, self.residual.rows(self.plan.sampled_rows)
        out = torch.empty((len(rows.stream), network.config.vocab_size), device=network.device)
        network.logits_into(rows, out)
        return out


def build_triton(
    config: ModelConfig, weights: TritonWeights, dtype: torch.dtype, device: torch.device
) -> TritonNetwork:
    """Puts a network together from weights as `read_weights` or `read_grouped_weights` give them."""
    maker = MatrixMaker(config, weights, dtype, device)
    embedding = maker.matrix(names.EMBEDDING)
    return TritonNetwork(
        config=config,
        device=device,
        weights=maker.forms,
        dtype=dtype,
        embedding=embedding,
        rotary=RotaryEmbedding.build(
            config.rope_theta, config.head_dim, config.rope_divisors, config.max_model_len, device
        ),
        layers=tuple(_layer(config, maker, names.layer_prefix(index)) for index in range(config.num_layers)),
        norm=maker.vector(names.FINAL_NORM, torch.float32),
        lm_head=embedding if config.tied_embeddings else maker.matrix(names.LM_HEAD),
    )


def _layer(config: ModelConfig, maker: MatrixMaker, prefix: str) -> LayerWeights:
    def norm(name: str) -> torch.Tensor:
        return maker.vector(prefix + name, torch.float32)

    return LayerWeights(
        attention_norm=norm(names.ATTENTION_NORM),
        qkv=maker.linear(prefix + names.QKV),
        head_norms=(norm(names.Q_NORM), norm(names.K_NORM)) if config.qk_norm else None,
        output=maker.linear(prefix + names.OUTPUT),
        mlp_norm=norm(names.MLP_NORM),
        gate_up=maker.linear(prefix + names.GATE_UP),
        down=maker.linear(prefix + names.DOWN),
    )
