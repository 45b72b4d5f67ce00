"""The decoder of the whole family: Llama, Mistral, Qwen2 and Qwen3 differ in biases, head norms and numbers only.

The residual stream is float32 whatever the weights are: it costs little and keeps 16-bit rounding out of the sum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from kvrelay.model import tensors as names
from kvrelay.model.attention import PagedAttention
from kvrelay.model.config import ModelConfig
from kvrelay.model.kv_cache import KVCache
from kvrelay.model.layers import GatedMLP, Projection, RMSNorm, RotaryEmbedding, Rotation
from kvrelay.model.step_plan import StepPlan, plan_step
from kvrelay.types import Batch

FORMS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Stores KV `[N, 2 * num_kv_heads, head_dim]` and gives the attention of q `[N, num_heads, head_dim]` over it,
`[N, num_heads * head_dim]`."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    config: ModelConfig
    attention_norm: RMSNorm
    qkv: Projection
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Projection
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, hidden: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """float32 `[N, hidden]` to the same."""
        q, kv = self._heads(self.attention_norm(hidden), rotation)
        hidden = hidden + self.output(attend(q, kv))
        return hidden + self.mlp(self.mlp_norm(hidden))

    def _heads(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = self.qkv(x).view(-1, num_heads + 2 * num_kv_heads, self.config.head_dim)
        qk, v = qkv[:, : num_heads + num_kv_heads].float(), qkv[:, num_heads + num_kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :num_heads]), self.k_norm(qk[:, num_heads:])), dim=1)
        qk = rotation(qk).to(x.dtype)
        return qk[:, :num_heads], torch.cat((qk[:, num_heads:], v), dim=1)


@dataclass(frozen=True, slots=True)
class TorchNetwork:
    """A decoder that computes by torch alone, on any device. See `forward.Network`."""

    config: ModelConfig
    device: torch.device
    weights: str
    embedding: torch.Tensor
    rotary: RotaryEmbedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: torch.Tensor

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream of tokens `[N]` before the first layer, float32 `[N, hidden]`."""
        return F.embedding(token_ids, self.embedding).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits `[rows, vocab]` of residual rows after the last layer."""
        return F.linear(self.norm(hidden), self.lm_head).float()

    def begin(self, batch: Batch, kv_cache: KVCache) -> "TorchPass":
        """See `forward.Network`."""
        plan = plan_step(batch, kv_cache.layout, kv_cache.num_blocks, self.device, self.embedding.dtype)
        return TorchPass(self, kv_cache, plan, self.rotary(plan.positions), self.embed(plan.token_ids))


@dataclass(slots=True)
class TorchPass:
    """See `forward.ForwardPass`. `hidden` is the residual stream, float32 `[N, hidden]`."""

    network: TorchNetwork
    kv_cache: KVCache
    plan: StepPlan
    rotation: Rotation
    hidden: torch.Tensor

    def compute(self, layer: int) -> None:
        """The next layer."""
        attend = PagedAttention.of_layer(self.plan, self.kv_cache, layer)
        self.hidden = self.network.layers[layer](self.hidden, self.rotation, attend)

    def logits(self) -> torch.Tensor:
        """float32 `[rows, vocab]` of what samples."""
        return self.network.logits(self.hidden.index_select(0, self.plan.sampled_rows))


def build_network(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> TorchNetwork:
    """Puts a network together from weights as `read_weights` gives them; on a CPU nothing is copied but norms."""
    maker = _Maker(config, weights, dtype, device)
    embedding = maker.tensor(names.EMBEDDING)
    return TorchNetwork(
        config=config,
        device=device,
        weights=FORMS[dtype],
        embedding=embedding,
        rotary=RotaryEmbedding.build(
            config.rope_theta, config.head_dim, config.rope_divisors, config.max_model_len, device
        ),
        layers=tuple(maker.layer(index) for index in range(config.num_layers)),
        norm=maker.norm(names.FINAL_NORM, dtype),
        lm_head=embedding if config.tied_embeddings else maker.tensor(names.LM_HEAD),
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str) -> torch.Tensor:
        return self.weights[name].to(self.device, self.dtype)

    def norm(self, name: str, dtype: torch.dtype) -> RMSNorm:
        return RMSNorm(self.weights[name].to(self.device, torch.float32), self.config.rms_norm_eps, dtype)

    def layer(self, index: int) -> DecoderLayer:
        prefix = names.layer_prefix(index)
        normed = self.config.qk_norm
        return DecoderLayer(
            config=self.config,
            attention_norm=self.norm(prefix + names.ATTENTION_NORM, self.dtype),
            qkv=self._joined(prefix, names.QKV, names.QKV_PARTS),
            q_norm=self.norm(prefix + names.Q_NORM, torch.float32) if normed else None,
            k_norm=self.norm(prefix + names.K_NORM, torch.float32) if normed else None,
            output=self._projection([prefix + names.OUTPUT]),
            mlp_norm=self.norm(prefix + names.MLP_NORM, self.dtype),
            mlp=GatedMLP(
                self._joined(prefix, names.GATE_UP, names.GATE_UP_PARTS), self._projection([prefix + names.DOWN])
            ),
        )

    def _joined(self, prefix: str, packed: str, parts: tuple[str, ...]) -> Projection:
        if f"{prefix}{packed}.weight" in self.weights:
            return self._projection([prefix + packed])
        return self._projection([prefix + part for part in parts])

    def _projection(self, stems: list[str]) -> Projection:
        biases = tuple(self.tensor(f"{stem}.bias") if f"{stem}.bias" in self.weights else None for stem in stems)
        return Projection(tuple(self.tensor(f"{stem}.weight") for stem in stems), biases)
