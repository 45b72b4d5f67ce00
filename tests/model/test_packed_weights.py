"""What becomes of a checkpoint's matrices, and that a network over them says what the plain one says."""

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from kvrelay.checkpoint import Checkpoint, resolve
from kvrelay.errors import StartError
from kvrelay.gguf_file import open_gguf
from kvrelay.kernels.linear_packing import Form, unpack_grouped
from kvrelay.model.config_gguf import config_from_gguf
from kvrelay.model.load import load
from kvrelay.model.loader_gguf import GGUFTensors
from kvrelay.model.packed_weights import PackedModel, Quantization, read_packed_weights
from kvrelay.model.runner import ModelRunner
from kvrelay.model.tensors import EMBEDDING
from kvrelay.model.weights import read_config
from tests.model.conftest import Driver, random_ids
from tests.model.test_gguf import VOCAB, write_gguf
from tests.places import CACHE_DIR
from tests.tiny_model import write_tiny_model

Q = GGMLQuantizationType
OWN_FORMS = {Q.Q4_0: Form.INT4, Q.Q4_1: Form.INT4, Q.Q8_0: Form.INT8}


def quantised(folder: Path, kind: GGMLQuantizationType, arch: str = "llama") -> Checkpoint:
    write_gguf(folder / "m.gguf", arch, kind=kind)
    return resolve(str(folder / "m.gguf"), folder / "cache")


def packed(checkpoint: Checkpoint, quantization: Quantization, dtype: torch.dtype = torch.float32) -> PackedModel:
    cache_dir = Path(checkpoint.path).parent / "cache"
    return read_packed_weights(checkpoint, read_config(checkpoint), quantization, dtype, cache_dir)


@pytest.mark.parametrize("kind", OWN_FORMS, ids=lambda kind: kind.name)
def test_what_a_file_has_in_groups_is_kept_bit_for_bit(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    checkpoint = quantised(tmp_path, kind)
    model = packed(checkpoint, Quantization.AUTO)
    assert {matrix.form for matrix in model.matrices.values()} == {OWN_FORMS[kind]}
    file = open_gguf(checkpoint.path)
    reader, prefix = GGUFTensors(file, config_from_gguf(file)), "model.layers.0.self_attn."
    rows = torch.cat([reader.read(f"{prefix}{part}_proj.weight") for part in "qkv"])
    values = unpack_grouped(model.matrices[f"{prefix}qkv_proj.weight"]).values
    torch.testing.assert_close(values, rows, rtol=2.0**-22, atol=2.0**-20)


def test_what_is_quantised_otherwise_gets_8_bits(tmp_path: Path) -> None:
    assert packed(quantised(tmp_path, Q.Q6_K), Quantization.AUTO).forms == "int8"


@pytest.mark.parametrize(
    ("quantization", "dtype", "forms"),
    [
        (Quantization.AUTO, torch.float32, "fp32"),
        (Quantization.AUTO, torch.bfloat16, "bf16"),
        (Quantization.NONE, torch.bfloat16, "bf16"),
        (Quantization.INT8, torch.float32, "int8"),
        (Quantization.INT4, torch.bfloat16, "int4+int8"),
    ],
)
def test_floating_point_weights_keep_their_precision_unless_they_are_told_not_to(
    quantization: Quantization, dtype: torch.dtype, forms: str, tmp_path: Path
) -> None:
    checkpoint = resolve(str(write_tiny_model(tmp_path / "model")), tmp_path / "cache")
    model = packed(checkpoint, quantization, dtype)
    assert model.forms == forms
    if quantization is Quantization.INT4:
        assert model.matrices[EMBEDDING].form is Form.INT8


def test_a_second_process_maps_what_the_first_has_packed(tmp_path: Path) -> None:
    checkpoint = quantised(tmp_path, Q.Q4_1)
    first, second = (packed(checkpoint, Quantization.AUTO) for _ in range(2))
    (file,) = (tmp_path / "cache" / "weights").glob("*.safetensors")
    assert all(torch.equal(first.matrices[name].tiles, second.matrices[name].tiles) for name in first.matrices)
    other = packed(checkpoint, Quantization.INT8)
    assert other.forms == "int8"
    assert len(list(file.parent.glob("*.safetensors"))) == 2


def runner_of(checkpoint: Checkpoint, kernels: str, quantization: Quantization) -> ModelRunner:
    return load(
        checkpoint,
        cache_dir=Path(checkpoint.path).parent / "cache",
        native_dir=CACHE_DIR,
        device="cpu",
        dtype="float32",
        kernels=kernels,
        quantization=quantization,
        kv_memory_bytes=4 << 20,
    )


@pytest.mark.parametrize("kind", OWN_FORMS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_logits_are_near_those_of_the_dequantised_network(
    arch: str, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    """Activations in 8 bits are off by 1/254 of the largest of 32 at most, here and there in one layer."""
    checkpoint = quantised(tmp_path, kind, arch)
    prompt = random_ids(90, VOCAB, 1)
    drivers = [Driver(runner_of(checkpoint, kernels, Quantization.AUTO)) for kernels in ("auto", "torch")]
    ours, plain = (driver.prefill(driver.sequence(prompt), 1000) for driver in drivers)
    assert (ours - plain).abs().max() < 0.03 * plain.std() * 4
    assert (ours != plain).any()


def test_a_precision_that_only_native_kernels_have_is_refused_without_them(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--quantization to auto or none"):
        runner_of(quantised(tmp_path, Q.Q4_1), "torch", Quantization.INT4)
