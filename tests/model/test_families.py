"""Every supported architecture against transformers, with small random weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvrelay.model.runner import ModelRunner
from tests.model.conftest import Driver, random_ids

SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama2": lambda: LlamaForCausalLM(LlamaConfig(**SMALL | {"num_key_value_heads": 4}, tie_word_embeddings=False)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-biased": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True, head_dim=24)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None, rms_norm_eps=1e-3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=False)),
    "one-kv-head": lambda: LlamaForCausalLM(LlamaConfig(**SMALL | {"num_key_value_heads": 1})),
}


@pytest.fixture(params=sorted(FAMILIES))
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(11)
    model: PreTrainedModel = FAMILIES[request.param]()
    model.train(False)
    for name, parameter in model.named_parameters():  # transformers leaves biases at 0 and norms at 1
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.5)
    return model


@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
def test_logits_equal_those_of_transformers(
    reference: PreTrainedModel, shard_size: str, tmp_path: Path, load_folder: Callable[[Path], ModelRunner]
) -> None:
    folder = tmp_path / "model"
    reference.save_pretrained(folder, max_shard_size=shard_size)
    assert (folder / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    _compare(load_folder(folder), reference)


def test_converted_weights_give_the_same_logits(
    reference: PreTrainedModel, tmp_path: Path, load_folder: Callable[[Path], ModelRunner]
) -> None:
    for parameter in reference.parameters():  # not `.to()`, which would round the rotary frequencies too
        parameter.data = parameter.data.to(torch.bfloat16)
    reference.save_pretrained(tmp_path / "model")
    runner = load_folder(tmp_path / "model")
    assert list((tmp_path / "cache" / "weights").glob("*.safetensors"))
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(torch.float32)
    _compare(runner, reference)


def test_old_names_of_rope_settings_are_read(tmp_path: Path, load_folder: Callable[[Path], ModelRunner]) -> None:
    torch.manual_seed(3)
    reference = FAMILIES["llama3"]()
    reference.train(False)
    reference.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    file.write_text(json.dumps(config))
    _compare(load_folder(tmp_path / "model"), reference)


def test_end_tokens_come_from_both_files(tmp_path: Path, load_folder: Callable[[Path], ModelRunner]) -> None:
    FAMILIES["llama2"]().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert load_folder(tmp_path / "model").config.eos_token_ids == {7, 8, 9}


def _compare(runner: ModelRunner, reference: PreTrainedModel) -> None:
    """Uneven chunks, then decoding; the logits after each against one whole pass of the reference."""
    driver = Driver(runner)
    sequence = driver.sequence(random_ids(103, 200, 2))
    ours = []
    driver.prefill(sequence, 29)
    ours.append(driver.logits[0])
    for _ in range(20):
        driver.step((sequence, 1))
        ours.append(driver.logits[0])
    with torch.inference_mode():
        expected = reference(torch.tensor([sequence.token_ids[:-1]])).logits[0, 102:]
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.stack(ours), expected, atol=1e-3, rtol=0)
    assert sequence.token_ids[103:] == expected.argmax(-1).tolist()
