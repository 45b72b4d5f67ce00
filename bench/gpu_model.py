"""A model of random weights on disk, of any shape, for benchmarks that start real workers: nothing is downloaded."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvrelay.bench.gpu_costs import Decoder

EOS = 0


def write_random_model(folder: Path, decoder: Decoder, max_model_len: int, seed: int, device: torch.device) -> None:
    """Writes a folder in Hugging Face's format: bfloat16 weights, drawn on the device, and a token for each id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(decoder, max_model_len)))
    generator = torch.Generator(device).manual_seed(seed)
    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator).mul_(shape[1] ** -0.5).cpu()
        for name, shape in _matrices(decoder)
    }
    norms = {name: torch.ones(decoder.hidden, dtype=torch.bfloat16) for name in _norms(decoder)}
    save_file(weights | norms, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(decoder.vocab).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def _config(decoder: Decoder, max_model_len: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": decoder.vocab,
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.intermediate,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }


def _matrices(decoder: Decoder) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes, outputs first."""
    yield "model.embed_tokens.weight", (decoder.vocab, decoder.hidden)
    heads, kv_heads = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    for layer in range(decoder.num_layers):
        prefix = f"model.layers.{layer}."
        for part, outputs in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}self_attn.{part}_proj.weight", (outputs, decoder.hidden)
        yield f"{prefix}self_attn.o_proj.weight", (decoder.hidden, heads)
        for part in ("gate", "up"):
            yield f"{prefix}mlp.{part}_proj.weight", (decoder.intermediate, decoder.hidden)
        yield f"{prefix}mlp.down_proj.weight", (decoder.hidden, decoder.intermediate)


def _norms(decoder: Decoder) -> Iterator[str]:
    yield "model.norm.weight"
    for layer in range(decoder.num_layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight"


def _tokenizer(vocab: int) -> Tokenizer:
    """A token for each byte, and names for all other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"<{token_id}>" for token_id in range(len(alphabet), vocab))][:vocab]
    made = Tokenizer(models.BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made
