"""Reads a ModelConfig from a folder in Hugging Face format (config.json and generation_config.json)."""

import math
from dataclasses import dataclass
from pathlib import Path

from kvrelay.checkpoint import read_json
from kvrelay.errors import ModelError
from kvrelay.model.config import ModelConfig
from kvrelay.model.fields import Fields


@dataclass(frozen=True, slots=True)
class _Family:
    """How an architecture differs from Llama's."""

    qkv_bias: bool | None = False  # None: `attention_bias` says, for the output projection too
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_heads


_FAMILIES = {
    "LlamaForCausalLM": _Family(qkv_bias=None),
    "MistralForCausalLM": _Family(),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(qkv_bias=None, qk_norm=True, head_dim=128),
}


def config_from_folder(path: Path) -> ModelConfig:
    """Reads the configuration of a model folder.

    Raises ModelError for an architecture, quantisation, rope scaling or option that is not supported, by its name.
    """
    fields = Fields(str(path / "config.json"), read_json(path / "config.json"))
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    _refuse_unsupported(fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // max(num_heads, 1))
    theta, divisors = _rope(fields, head_dim)
    biased = fields.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_model_len=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_divisors=divisors,
        qkv_bias=biased,
        output_bias=biased and family.qkv_bias is None,
        qk_norm=family.qk_norm,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=fields.token_ids("eos_token_id") | _generation_eos(path),
    )


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in _FAMILIES:
            return str(name)
    raise ModelError(
        f"{fields.source} names the architecture {names!r}, but supported are {', '.join(_FAMILIES)}; "
        "choose a model of one of these."
    )


def _refuse_unsupported(fields: Fields) -> None:
    if (quantisation := fields.get("quantization_config")) is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise ModelError(
            f"{fields.source} says that the weights are quantised by {method!r}, but folders are supported with "
            "float32, float16 and bfloat16 weights only; take such weights, or a .gguf file."
        )
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.wrong("hidden_act", fields.get("hidden_act"), "'silu'")
    if fields.flag("mlp_bias", False):
        raise fields.wrong("mlp_bias", True, "false")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.wrong("partial_rotary_factor", fields.get("partial_rotary_factor"), "1.0")
    if _window_is_active(fields):
        raise fields.wrong("sliding_window", fields.get("sliding_window"), "a model with full attention in every layer")


def _window_is_active(fields: Fields) -> bool:
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list) and layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    if fields.get("sliding_window") is None or not fields.flag("use_sliding_window", _uses_window_by_default(fields)):
        return False
    windowed_from = fields.integer("max_window_layers", 0)
    within = fields.integer("sliding_window") < fields.integer("max_position_embeddings")
    return within and windowed_from < fields.integer("num_hidden_layers")


def _uses_window_by_default(fields: Fields) -> bool:
    # Qwen's files carry a window that is off unless they say otherwise; Mistral's carry one only if it is on.
    return fields.get("model_type") not in ("qwen2", "qwen3")


def _rope(fields: Fields, head_dim: int) -> tuple[float, tuple[float, ...]]:
    """Base of the frequencies and their divisors, from transformers' old fields or its newer `rope_parameters`."""
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    old_theta = fields.number("rope_theta", 10_000.0)
    if scaling is None:
        return old_theta, ()
    theta = scaling.number("rope_theta", old_theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, ()
    if kind != "llama3":
        raise scaling.wrong("rope_type", kind, "'llama3' or 'default'")
    return theta, _llama3_divisors(scaling, theta, head_dim)


def _llama3_divisors(scaling: Fields, theta: float, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, trained = scaling.number("factor"), scaling.number("original_max_position_embeddings")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if factor <= 0 or high == low:
        raise scaling.wrong("factor and frequency bounds", (factor, low, high), "a positive factor and two bounds")
    divisors = []
    for pair in range(head_dim // 2):
        turns = trained / (2 * math.pi * theta ** (2 * pair / head_dim))
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(divisors)


def _generation_eos(path: Path) -> frozenset[int]:
    file = path / "generation_config.json"
    return Fields(str(file), read_json(file)).token_ids("eos_token_id") if file.exists() else frozenset()
