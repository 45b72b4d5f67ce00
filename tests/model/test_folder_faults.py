"""Model folders that are damaged, incomplete or not supported: each gives one sentence that names the fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.errors import ModelError, StartError
from kvrelay.model import weight_cache
from kvrelay.model.runner import ModelRunner
from kvrelay.model.weight_cache import TensorSpec, cached_weights
from tests.model.test_families import FAMILIES

Load = Callable[[Path], ModelRunner]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    FAMILIES["llama2"]().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "Mamba.*LlamaForCausalLM"),
        ({"architectures": None}, "architecture None"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": 4}, r"lacks model\.layers\.3"),
        ({"num_hidden_layers": 2}, r"has model\.layers\.2.*does not use"),
        ({"intermediate_size": 113}, r"gate_proj.*\(112, 64\) instead of \(113, 64\)"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"lacks .*bias"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"sliding_window": 64, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "sliding_window"),
        ({"sliding_window": 64, "use_sliding_window": True, "model_type": "qwen2"}, "sliding_window"),
    ],
)
def test_a_configuration_that_cannot_be_served(
    changes: dict[str, Any], named: str, folder: Path, load_folder: Load
) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=named):
        load_folder(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 512, "model_type": "mistral"},
        {"sliding_window": 64, "use_sliding_window": False},
        {"sliding_window": 64, "model_type": "qwen2"},
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
    ],
)
def test_a_window_that_never_closes_is_served(changes: dict[str, Any], folder: Path, load_folder: Load) -> None:
    change_config(folder, **changes)
    assert load_folder(folder).config.num_layers == 3


def test_damaged_weights_are_refused(folder: Path, load_folder: Load) -> None:
    content = (folder / "model.safetensors").read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        (folder / "model.safetensors").write_bytes(content[:size])
        with pytest.raises(ModelError, match="damaged or truncated"):
            load_folder(folder)


def test_a_missing_tensor_is_named(folder: Path, load_folder: Load) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_folder(folder)


def test_weights_of_integers_are_refused(folder: Path, load_folder: Load) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight as I8"):
        load_folder(folder)


@pytest.mark.parametrize("content", ['{"weight_map": {}}', "[]", "{", '{"weight_map": {"a": "gone.safetensors"}}'])
def test_a_damaged_index_is_refused(content: str, folder: Path, load_folder: Load) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json|gone\.safetensors"):
        load_folder(folder)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, specs: list[TensorSpec]) -> str:
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_cache, "_write", full)
    spec = TensorSpec("a", (2,), torch.float32, lambda: torch.zeros(2))
    with pytest.raises(StartError, match=r"No space left on device.*make room"):
        cached_weights("f" * 64, [spec], tmp_path)
    assert [file.suffix for file in (tmp_path / "weights").iterdir()] == [".lock"]


def test_odd_shapes_are_cached_exactly(tmp_path: Path) -> None:
    values = {f"t{size}": torch.randn(size, 3) for size in (1, 5, 16, 33)}
    specs = [TensorSpec(name, tuple(t.shape), torch.bfloat16, t.clone) for name, t in values.items()]
    for _ in range(2):
        weights = cached_weights("f" * 64, specs, tmp_path)
        assert all(torch.equal(weights[name], value.to(torch.bfloat16)) for name, value in values.items())
