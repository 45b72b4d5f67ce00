"""Reads a ModelConfig from the metadata of a GGUF file."""

import struct

from kvrelay.errors import ModelError
from kvrelay.gguf_file import GGUFFile
from kvrelay.model.config import ModelConfig
from kvrelay.model.fields import Fields

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_END_TOKENS = ("eos", "eot", "eom")
_GGML_F32 = 0


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Reads the configuration. Raises ModelError for what is not supported, naming it, or if the file is damaged."""
    fields = Fields(str(file.path), file.metadata)
    arch = fields.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds the architecture {arch!r}, but supported in GGUF are {', '.join(_ARCHITECTURES)}; "
            "choose a model of one of these."
        )
    _refuse_unsupported(fields, arch)
    hidden_size, num_heads = fields.integer(f"{arch}.embedding_length"), fields.integer(f"{arch}.attention.head_count")
    head_dim = fields.integer(f"{arch}.attention.key_length", hidden_size // max(num_heads, 1))
    _refuse_other_head_sizes(fields, arch, head_dim)
    return ModelConfig(
        architecture=_ARCHITECTURES[arch],
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length"),
        num_layers=fields.integer(f"{arch}.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_model_len=fields.integer(f"{arch}.context_length"),
        rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(f"{arch}.rope.freq_base", 10_000.0),
        rope_divisors=_rope_divisors(file),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
        eos_token_ids=_end_token_ids(fields),
    )


def _refuse_unsupported(fields: Fields, arch: str) -> None:
    if fields.integer(f"{arch}.expert_count", 0):
        raise fields.wrong(f"{arch}.expert_count", fields.get(f"{arch}.expert_count"), "a model without experts")
    scaling = fields.get(f"{arch}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise fields.wrong(f"{arch}.rope.scaling.type", scaling, "'none' or a rope_freqs.weight tensor (llama3)")
    window = fields.integer(f"{arch}.attention.sliding_window", 0)
    if 0 < window < fields.integer(f"{arch}.context_length"):
        raise fields.wrong(f"{arch}.attention.sliding_window", window, "a model with full attention in every layer")


def _refuse_other_head_sizes(fields: Fields, arch: str, head_dim: int) -> None:
    for name in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (size := fields.integer(name, head_dim)) != head_dim:
            raise fields.wrong(name, size, f"the key length {head_dim}")


def _vocab_size(file: GGUFFile) -> int:
    # The embedding counts, not `vocab_size`: that is missing in older files, and padding rows are legal tokens too.
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight (a matrix); get the file again.")
    return embedding.shape[0]


def _rope_divisors(file: GGUFFile) -> tuple[float, ...]:
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return ()
    count = info.shape[0] if len(info.shape) == 1 else 0
    if info.ggml_type != _GGML_F32 or not 0 < count <= (len(file.data) - info.offset) // 4:
        raise ModelError(f"{file.path} has a damaged rope_freqs.weight (a float32 vector was expected); get it again.")
    return struct.unpack_from(f"<{count}f", file.data, info.offset)


def _end_token_ids(fields: Fields) -> frozenset[int]:
    named = [fields.token_ids(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS]
    return frozenset[int]().union(*named)
