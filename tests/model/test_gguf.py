"""GGUF files: every quantisation and architecture, and the order of q and k rows, against the values written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvrelay.checkpoint import resolve
from kvrelay.errors import ModelError
from kvrelay.gguf_file import open_gguf
from kvrelay.model.config_gguf import config_from_gguf
from kvrelay.model.loader_gguf import GGUFTensors
from kvrelay.model.runner import ModelRunner
from kvrelay.model.weights import read_weights
from tests.model.conftest import Driver, random_ids

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 256, 8, 4, 32, 512, 96
Q = GGMLQuantizationType
WRITABLE = (Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1)
K_QUANTS = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K)


def write_gguf(
    path: Path, arch: str = "llama", kind: GGMLQuantizationType = Q.F32, fields: dict[str, int] | None = None
) -> dict[str, np.ndarray]:
    """A model of one layer with random weights; gives the values that a reader should see, by GGUF name."""
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(4)
    for name, value in (fields or {}).items():
        writer.add_uint32(f"{arch}.{name.replace('__', '.')}", value)
    values = {}
    for index, (name, shape) in enumerate(_shapes(arch).items()):
        stored, values[name] = _tensor(shape, kind if len(shape) == 2 else Q.F32, index)
        writer.add_tensor(name, stored, raw_dtype=kind if len(shape) == 2 else Q.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _shapes(arch: str) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q_size, HIDDEN),
        "attn_k.weight": (kv_size, HIDDEN),
        "attn_v.weight": (kv_size, HIDDEN),
        "attn_output.weight": (HIDDEN, q_size),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (MLP, HIDDEN),
        "ffn_up.weight": (MLP, HIDDEN),
        "ffn_down.weight": (HIDDEN, MLP),
    }
    if arch == "qwen2":
        layer |= {"attn_q.bias": (q_size,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
    if arch == "qwen3":
        layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    named = {f"blk.0.{name}": shape for name, shape in layer.items()}
    return named | {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}


def _tensor(shape: tuple[int, ...], kind: GGMLQuantizationType, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to store and the values they stand for. K-quants have no quantiser: a scale of 1/64 and random codes."""
    generator = np.random.default_rng(seed)
    if kind not in K_QUANTS:
        stored = quantize((generator.standard_normal(shape) * 0.1).astype(np.float32), kind)
        return stored, dequantize(stored, kind).reshape(shape)
    group, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (shape[0], shape[1] // group, num_bytes), np.uint8)
    scales = {Q.Q2_K: (80, 82), Q.Q3_K: (108,), Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,)}[kind]
    for offset in scales:
        blocks[:, :, offset : offset + 2] = np.frombuffer(np.float16(1 / 1024).tobytes(), np.uint8)
    stored = blocks.reshape(shape[0], -1)
    return stored, dequantize(stored, kind).reshape(shape)


@pytest.mark.parametrize("kind", [*WRITABLE, *K_QUANTS], ids=lambda kind: kind.name)
def test_tensors_have_the_values_of_every_quantisation(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "m.gguf", kind=kind)
    file = open_gguf(tmp_path / "m.gguf")
    reader = GGUFTensors(file, config_from_gguf(file))
    down = reader.read("model.layers.0.mlp.down_proj.weight").numpy()
    np.testing.assert_array_equal(down, values["blk.0.ffn_down.weight"])
    assert down.std() > 0


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_q_and_k_rows_are_put_back_in_order_for_llama_only(arch: str, tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "m.gguf", arch)
    file = open_gguf(tmp_path / "m.gguf")
    reader = GGUFTensors(file, config_from_gguf(file))
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        stored = values[f"blk.0.attn_{part}.weight"]
        expected = stored.copy()
        for row in range(heads * HEAD_DIM) if arch == "llama" else ():
            head, within = divmod(row, HEAD_DIM)
            half, pair = divmod(within, HEAD_DIM // 2)
            expected[row] = stored[head * HEAD_DIM + 2 * pair + half]
        read = reader.read(f"model.layers.0.self_attn.{part}_proj.weight").numpy()
        np.testing.assert_array_equal(read, expected)
        assert (read != stored).any() == (arch == "llama")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_every_architecture_runs(arch: str, tmp_path: Path, load_folder: Callable[[Path], ModelRunner]) -> None:
    write_gguf(tmp_path / "m.gguf", arch)
    runner = load_folder(tmp_path / "m.gguf")
    config = runner.config
    assert (config.qkv_bias, config.qk_norm) == (arch == "qwen2", arch == "qwen3")
    assert config.tied_embeddings
    assert config.eos_token_ids == {3, 4}
    driver = Driver(runner)
    whole = driver.prefill(driver.sequence(random_ids(40, VOCAB, 1)), 40)
    assert whole.isfinite().all()
    torch.testing.assert_close(driver.prefill(driver.sequence(random_ids(40, VOCAB, 1)), 7), whole, atol=1e-4, rtol=0)


def test_weights_are_packed_and_mapped_from_one_file(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "m.gguf", "qwen2", Q.Q8_0)
    checkpoint = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    config = config_from_gguf(open_gguf(checkpoint.path))
    weights = read_weights(checkpoint, config, torch.float32, tmp_path / "cache")
    qkv = np.concatenate([values[f"blk.0.attn_{part}.weight"] for part in "qkv"])
    np.testing.assert_array_equal(weights["model.layers.0.self_attn.qkv_proj.weight"].numpy(), qkv)
    (file,) = (tmp_path / "cache" / "weights").glob("*.safetensors")
    assert str(file) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "no digest"])
def test_a_damaged_cache_file_is_rebuilt(harm: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    checkpoint = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    config = config_from_gguf(open_gguf(checkpoint.path))
    read_weights(checkpoint, config, torch.float32, tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "weights").glob("*.safetensors")
    content = file.read_bytes()
    middle = len(content) // 2
    harmed = {"cut": content[:middle], "empty": b"", "flip": content[:middle] + b"\xff" * 64 + content[middle + 64 :]}
    file.unlink()
    file.write_bytes(harmed.get(harm, content))
    if harm == "no digest":
        file.with_suffix(".sha256").unlink()
    read_weights(checkpoint, config, torch.float32, tmp_path / "cache")
    assert file.read_bytes() == content


def test_rope_frequencies_of_the_file_are_used(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert config_from_gguf(open_gguf(tmp_path / "m.gguf")).rope_divisors == ()
    writer = GGUFWriter(tmp_path / "f.gguf", "llama")
    writer.add_tensor("rope_freqs.weight", np.arange(16, dtype=np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    for name, value in (("embedding_length", 256), ("attention.head_count", 8), ("feed_forward_length", 8)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert config_from_gguf(open_gguf(tmp_path / "f.gguf")).rope_divisors == tuple(map(float, range(16)))


@pytest.mark.parametrize(
    ("arch", "fields", "named"),
    [
        ("gemma", {}, "gemma"),
        ("llama", {"expert_count": 8}, "expert_count"),
        ("llama", {"rope__dimension_count": 16}, "dimension_count"),
        ("qwen2", {"attention__sliding_window": 64}, "sliding_window"),
    ],
)
def test_unsupported_networks_are_named(arch: str, fields: dict[str, int], named: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", arch, fields=fields)
    with pytest.raises(ModelError, match=named):
        config_from_gguf(open_gguf(tmp_path / "m.gguf"))


def test_an_unsupported_quantisation_is_named(tmp_path: Path, load_folder: Callable[[Path], ModelRunner]) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Q.TQ1_0)
    with pytest.raises(ModelError, match="TQ1_0"):
        load_folder(tmp_path / "m.gguf")


def test_any_cut_of_a_file_is_refused(tmp_path: Path, load_folder: Callable[[Path], ModelRunner]) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Q.Q4_1)
    content = (tmp_path / "m.gguf").read_bytes()
    for size in [*range(0, 2500, 53), len(content) // 2, len(content) - 1024]:
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"get the file again|not a GGUF file"):
            load_folder(tmp_path / "cut.gguf")
