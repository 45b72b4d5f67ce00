"""The KV cache: bytes that leave and come back, odd shapes, wrong sizes, and how much memory it gets."""

import numpy as np
import pytest
import torch

from kvrelay.errors import MemoryShortage, WireError
from kvrelay.kernels.quantized_kv import row_size
from kvrelay.model import kv_memory
from kvrelay.model.kv_cache import KVCache
from kvrelay.model.kv_memory import asked_kv_memory, available_memory, default_kv_memory, num_kv_blocks
from kvrelay.types import KVLayout

CPU = torch.device("cpu")


def layout(dtype: str = "bfloat16", heads: int = 3, block_size: int = 5, head_dim: int = 7) -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)


def filled(shape: KVLayout, num_blocks: int, seed: int) -> KVCache:
    cache = KVCache(shape, num_blocks, CPU)
    values = torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(seed))
    cache.tensor.copy_(values * 40 if shape.dtype == "int8" else values)
    return cache


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
@pytest.mark.parametrize(("heads", "block_size", "head_dim"), [(3, 5, 7), (1, 1, 1), (2, 16, 64)])
@pytest.mark.parametrize("block_ids", [[4], [0, 1, 2], [5, 0, 3], []])
def test_blocks_come_back_as_they_left(
    dtype: str, heads: int, block_size: int, head_dim: int, block_ids: list[int]
) -> None:
    shape = layout(dtype, heads, block_size, head_dim)
    source, target = filled(shape, 6, 1), filled(shape, 8, 2)
    before = target.tensor.clone()
    payload = source.read(1, block_ids)
    assert payload.nbytes == len(block_ids) * shape.block_bytes
    moved_to = [7 - block_id for block_id in block_ids]
    target.write(1, moved_to, payload)
    expected = before.clone()
    expected[1, moved_to] = source.tensor[1, block_ids]
    assert torch.equal(target.tensor, expected)


def test_a_payload_is_the_blocks_one_after_the_other() -> None:
    cache = filled(layout("float32"), 4, 3)
    expected = torch.cat([cache.tensor[0, 2].flatten(), cache.tensor[0, 0].flatten()]).numpy().tobytes()
    assert bytes(cache.read(0, [2, 0])) == expected


def test_a_payload_is_a_copy() -> None:
    cache = filled(layout(), 4, 3)
    payload = cache.read(0, [1])
    before = bytes(payload)
    cache.tensor.zero_()
    assert bytes(payload) == before


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_are_accepted(kind: type) -> None:
    cache = filled(layout(), 4, 3)
    expected = cache.tensor[0, 1].clone()
    payload = kind(bytes(cache.read(0, [1])))
    cache.write(0, [3], payload)
    assert torch.equal(cache.tensor[0, 3], expected)


def test_every_bit_survives_nan_too() -> None:
    cache = KVCache(layout(), 2, CPU)
    payload = np.random.default_rng(0).integers(0, 256, cache.layout.block_bytes, np.uint8).tobytes()
    cache.write(0, [1], payload)
    assert bytes(cache.read(0, [1])) == payload


@pytest.mark.parametrize("change", [-1, 1, 210])
def test_a_payload_of_another_size_is_refused_and_changes_nothing(change: int) -> None:
    cache = filled(layout(), 4, 3)
    before = cache.tensor.clone()
    with pytest.raises(WireError, match="were expected"):
        cache.write(0, [1, 2], bytes(2 * cache.layout.block_bytes + change))
    assert torch.equal(cache.tensor, before)


@pytest.mark.parametrize(("layer", "block_id"), [(2, 0), (-1, 0), (0, 4), (0, -1)])
def test_blocks_and_layers_that_do_not_exist_are_refused(layer: int, block_id: int) -> None:
    cache = KVCache(layout(), 4, CPU)
    with pytest.raises(IndexError, match="exist"):
        cache.read(layer, [block_id])
    with pytest.raises(IndexError, match="exist"):
        cache.write(layer, [block_id], bytes(cache.layout.block_bytes))


def test_an_unknown_dtype_or_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match="4 blocks of int4"):
        KVCache(layout("int4"), 4, CPU)
    with pytest.raises(ValueError, match="0 blocks"):
        KVCache(layout(), 0, CPU)


def test_memory_is_counted_over_all_layers() -> None:
    shape = layout("float32")
    bytes_per_block = 2 * 2 * 3 * 5 * 7 * 4
    assert num_kv_blocks(shape, 20, bytes_per_block * 4) == 4
    assert num_kv_blocks(shape, 20, bytes_per_block * 5 - 1) == 4
    with pytest.raises(MemoryShortage):
        num_kv_blocks(shape, 20, bytes_per_block * 4 - 1)
    with pytest.raises(MemoryShortage, match=r"of 2 MiB .* 1000000 tokens, which needs 320 MiB"):
        num_kv_blocks(shape, 1_000_000, 2 << 20)


def test_int8_takes_a_byte_for_each_value_and_a_float_for_each_head() -> None:
    """As `quantize_kv` lays them out."""
    shape = layout("int8")
    assert shape.block_bytes == 2 * 3 * 5 * (7 + 4)
    assert KVCache(shape, 4, CPU).tensor.shape == (2, 4, 2, 3, 5, row_size(7, torch.int8))
    wide = [layout(dtype, 8, 16, 128) for dtype in ("bfloat16", "int8")]
    assert [num_kv_blocks(each, 16, 1 << 24) for each in wide] == [128, 248]


def test_workers_share_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "available_memory", lambda device: 1 << 20)
    assert default_kv_memory(layout(), 10_000, 1, CPU) == 1 << 19
    assert default_kv_memory(layout(), 10_000, 4, CPU) == 1 << 17
    assert default_kv_memory(layout(), 10, 1, CPU) == 16 * 2 * 2 * 420
    with pytest.raises(ValueError, match="0 workers"):
        default_kv_memory(layout(), 10, 0, CPU)
    assert kv_memory.available_memory(CPU) == 1 << 20


def test_free_memory_of_this_machine_is_plausible() -> None:
    assert 1 << 20 < kv_memory.available_memory(CPU) < 1 << 46


def test_more_kv_memory_than_the_machine_has_is_refused_before_it_is_taken() -> None:
    free = available_memory(CPU)
    assert asked_kv_memory(free // 4, 2, CPU) == free // 4
    with pytest.raises(MemoryShortage, match=r"2 workers.*--kv-memory"):
        asked_kv_memory(free // 2 + 2**30, 2, CPU)
