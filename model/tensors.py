"""The tensors a network is made of, under Hugging Face's names, and how they are packed for fewer, larger products."""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from kvrelay.errors import ModelError
from kvrelay.kernels.grouped_weights import GroupedWeights
from kvrelay.kernels.linear_packing import Form
from kvrelay.model.config import ModelConfig

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
QKV_PARTS, QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"
GATE_UP_PARTS, GATE_UP = ("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"
OUTPUT, DOWN = "self_attn.o_proj", "mlp.down_proj"
ATTENTION_NORM, MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
Q_NORM, K_NORM = "self_attn.q_norm.weight", "self_attn.k_norm.weight"

Shape = tuple[int, ...]


class TensorReader(Protocol):
    """A checkpoint's tensors under Hugging Face's names."""

    @property
    def source(self) -> str:
        """Where the tensors are, for errors."""
        ...

    @property
    def names(self) -> Collection[str]:
        """What there is."""
        ...

    def shape(self, name: str) -> Shape:
        """The shape, rows (outputs) first."""
        ...

    def dtype(self, name: str) -> torch.dtype | None:
        """The stored type; None for quantised tensors. Raises ModelError for a type that cannot be read."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in a floating-point type. Raises ModelError if it cannot be read."""
        ...

    def form(self, name: str) -> Form | None:
        """INT4 or INT8 for a matrix that is stored in such groups as `grouped` gives; None for any other."""
        ...

    def grouped(self, name: str) -> GroupedWeights:
        """A matrix that has a form, as it is stored. Raises ModelError if it cannot be read."""
        ...


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this configuration must have."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    sizes = dict(zip(QKV_PARTS, (q_size, kv_size, kv_size), strict=True))
    shapes: dict[str, Shape] = {f"{part}.weight": (size, hidden) for part, size in sizes.items()}
    shapes |= {f"{part}.weight": (config.intermediate_size, hidden) for part in GATE_UP_PARTS}
    shapes |= {f"{OUTPUT}.weight": (hidden, q_size), f"{DOWN}.weight": (hidden, config.intermediate_size)}
    shapes |= {ATTENTION_NORM: (hidden,), MLP_NORM: (hidden,)}
    if config.qkv_bias:
        shapes |= {f"{part}.bias": (size,) for part, size in sizes.items()}
    if config.output_bias:
        shapes[f"{OUTPUT}.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {Q_NORM: (config.head_dim,), K_NORM: (config.head_dim,)}
    return shapes


def packing(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """For each tensor of the packed form the checkpoint's tensors whose rows it joins, in order."""
    packed: dict[str, tuple[str, ...]] = {}
    for name in expected_shapes(config):
        target: str = name
        parts: tuple[str, ...] = (name,)
        for joined, members in ((QKV, QKV_PARTS), (GATE_UP, GATE_UP_PARTS)):
            part = next((member for member in members if f".{member}." in name), None)
            if part is not None:
                target, parts = name.replace(part, joined), tuple(name.replace(part, member) for member in members)
        packed[target] = parts
    return packed


def is_norm(name: str) -> bool:
    """True for the weights of norms, which stay in float32 whatever the network computes in."""
    return name.endswith("norm.weight")


def check_tensors(reader: TensorReader, expected: Mapping[str, Shape]) -> None:
    """Raises ModelError naming the first tensors that are missing, of another shape or type, or none of the network."""
    if missing := sorted(set(expected) - set(reader.names)):
        raise _wrong(reader, f"it lacks {_some(missing)}")
    for name, shape in expected.items():
        if reader.shape(name) != shape:
            raise _wrong(reader, f"{name} has the shape {reader.shape(name)} instead of {shape}")
        reader.dtype(name)  # which says so if it cannot be read
    if unknown := sorted(name for name in set(reader.names) - set(expected) if not _is_harmless(name)):
        raise _wrong(reader, f"it has {_some(unknown)}, which this architecture does not use")


def _is_harmless(name: str) -> bool:
    # Old exports keep the rotary table, and tied models may keep a copy of the embedding.
    return name.endswith("rotary_emb.inv_freq") or name == LM_HEAD


def _wrong(reader: TensorReader, what: str) -> ModelError:
    return ModelError(f"{reader.source} does not fit its configuration: {what}; get the model again.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
