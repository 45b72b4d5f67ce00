"""The decoder on native CPU kernels: the same network as `network.TorchNetwork`, over packed weights.

Every kernel gives a row the same bits whatever other rows are beside it, so that a token depends on its sequence alone:
not on the batch, on how its prompt was cut into chunks, on block sizes, or on what was found in a cache.
"""

from dataclasses import dataclass

import torch

from kvrelay.kernels.decoder import DecoderLayers, HeadShape, LayerWeights, StepUnderWay
from kvrelay.kernels.linear import LinearKernels
from kvrelay.kernels.linear_packing import PackedWeights, unpack_rows
from kvrelay.kernels.native_library import NativeLibrary
from kvrelay.kernels.pointwise import PointwiseKernels
from kvrelay.model import tensors as names
from kvrelay.model.config import ModelConfig
from kvrelay.model.kv_cache import KVCache
from kvrelay.model.layers import RotaryEmbedding
from kvrelay.model.native_plan import NativePlan, plan_native
from kvrelay.model.packed_weights import PackedModel
from kvrelay.types import Batch


@dataclass(frozen=True, slots=True)
class NativeNetwork:
    """See `forward.Network`."""

    config: ModelConfig
    device: torch.device
    weights: str
    embedding: PackedWeights | torch.Tensor
    layers: DecoderLayers
    norm: torch.Tensor
    lm_head: PackedWeights
    linear: LinearKernels
    pointwise: PointwiseKernels

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream of tokens `[N]` before the first layer, float32 `[N, hidden]`."""
        if isinstance(self.embedding, PackedWeights):
            return unpack_rows(self.embedding, token_ids).contiguous()
        return self.embedding.index_select(0, token_ids).float()

    def logits(self, residual: torch.Tensor) -> torch.Tensor:
        """float32 logits `[rows, vocab]` of residual rows after the last layer."""
        eps = self.config.rms_norm_eps
        return self.linear(self.pointwise.add_and_norm(residual, None, self.norm, eps, torch.float32), self.lm_head)

    def begin(self, batch: Batch, kv_cache: KVCache) -> "NativePass":
        """See `forward.Network`."""
        plan = plan_native(batch, kv_cache.layout, kv_cache.num_blocks, self.config.max_model_len)
        residual = self.embed(plan.token_ids)
        return NativePass(self, plan, self.layers.begin(residual, plan.read, plan.written, kv_cache.tensor))


@dataclass(frozen=True, slots=True)
class NativePass:
    """See `forward.ForwardPass`."""

    network: NativeNetwork
    plan: NativePlan
    step: StepUnderWay

    def compute(self, layer: int) -> None:
        """The next layer."""
        self.network.layers.compute(layer, self.step)

    def logits(self) -> torch.Tensor:
        """float32 `[rows, vocab]` of what samples."""
        return self.network.logits(self.step.residual.index_select(0, self.plan.sampled_rows))


def build_native(config: ModelConfig, model: PackedModel, native: NativeLibrary, num_threads: int) -> NativeNetwork:
    """Puts a network together from weights as `read_packed_weights` gives them."""
    device = torch.device("cpu")
    rotary = RotaryEmbedding.build(
        config.rope_theta, config.head_dim, config.rope_divisors, config.max_model_len, device
    )
    embedding = model.matrices.get(names.EMBEDDING)
    heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
    layers = tuple(_layer(model, names.layer_prefix(index)) for index in range(config.num_layers))
    return NativeNetwork(
        config=config,
        device=device,
        weights=model.forms,
        embedding=model.tensors[names.EMBEDDING] if embedding is None else embedding,
        layers=DecoderLayers(native, num_threads, layers, heads, rotary.cos, rotary.sin),
        norm=model.tensors[names.FINAL_NORM],
        lm_head=model.matrices[names.EMBEDDING if config.tied_embeddings else names.LM_HEAD],
        linear=LinearKernels(native, num_threads),
        pointwise=PointwiseKernels(native, num_threads),
    )


def _layer(model: PackedModel, prefix: str) -> LayerWeights:
    matrices, tensors = model.matrices, model.tensors
    return LayerWeights(
        attention_norm=tensors[prefix + names.ATTENTION_NORM],
        qkv=matrices[f"{prefix}{names.QKV}.weight"],
        qkv_bias=tensors.get(f"{prefix}{names.QKV}.bias"),
        q_norm=tensors.get(prefix + names.Q_NORM),
        k_norm=tensors.get(prefix + names.K_NORM),
        output=matrices[f"{prefix}{names.OUTPUT}.weight"],
        output_bias=tensors.get(f"{prefix}{names.OUTPUT}.bias"),
        mlp_norm=tensors[prefix + names.MLP_NORM],
        gate_up=matrices[f"{prefix}{names.GATE_UP}.weight"],
        down=matrices[f"{prefix}{names.DOWN}.weight"],
    )
