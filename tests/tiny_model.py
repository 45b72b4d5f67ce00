"""A model folder small enough for tests that start real processes: random weights, one token a byte."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 260  # 256 bytes and four special tokens
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Writes the folder in Hugging Face's format and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"})
    )
    return folder


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {"model.embed_tokens.weight": random(VOCAB, 64), "model.norm.weight": torch.ones(64)}
    for layer in range(3):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.self_attn.q_proj.weight": random(64, 64),
            f"{name}.self_attn.k_proj.weight": random(32, 64),
            f"{name}.self_attn.v_proj.weight": random(32, 64),
            f"{name}.self_attn.o_proj.weight": random(64, 64),
            f"{name}.mlp.gate_proj.weight": random(128, 64),
            f"{name}.mlp.up_proj.weight": random(128, 64),
            f"{name}.mlp.down_proj.weight": random(64, 128),
            f"{name}.input_layernorm.weight": torch.ones(64),
            f"{name}.post_attention_layernorm.weight": torch.ones(64),
        }
    return weights


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
