"""The kernels that pack and unpack KV blocks: every bit as the plain twin copies it, and no byte beyond."""

import random
from types import ModuleType

import pytest
import torch

from kvrelay.kernels.block_copy import gather_blocks, scatter_blocks
from tests.kernels.interpreted import load_kernels

POISON = 0xA5
# Bytes of a block: a lone one, odd tails, every word size, more than one program's share, and the bundled model's.
BLOCK_BYTES = (1, 3, 2, 6, 4, 12, 8, 40, 8191, 8192, 8193, 24584, 12288)
BLOCK_IDS: tuple[list[int], ...] = ([4], [0, 1, 2], [5, 0, 3], [6, 5, 4, 3, 2, 1, 0], [])


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Interpreted: the very code of the kernels, on tensors of the CPU."""
    return load_kernels("block_copy_triton", interpreted=True)


def bits(*shape: int) -> torch.Tensor:
    """Any bits, those of NaNs too."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def poisoned(num_rows: int, row_bytes: int, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to write to, `offset` bytes off alignment, and all memory around them."""
    around = torch.full((offset + num_rows * row_bytes + 64,), POISON, dtype=torch.uint8)
    return around[offset : offset + num_rows * row_bytes].view(num_rows, row_bytes), around


@pytest.mark.parametrize("block_ids", BLOCK_IDS)
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_packing_is_that_of_the_twin(kernels: ModuleType, block_bytes: int, block_ids: list[int]) -> None:
    layer, ids = bits(7, block_bytes), torch.tensor(block_ids, dtype=torch.int64)
    packed, around = poisoned(len(block_ids), block_bytes)
    twin, around_twin = poisoned(len(block_ids), block_bytes)
    kernels.gather(layer, ids, packed)
    gather_blocks(layer, ids, twin)
    assert torch.equal(packed, layer[ids])
    assert torch.equal(around, around_twin)


@pytest.mark.parametrize("block_ids", BLOCK_IDS)
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_unpacking_is_that_of_the_twin(kernels: ModuleType, block_bytes: int, block_ids: list[int]) -> None:
    packed, ids = bits(len(block_ids), block_bytes), torch.tensor(block_ids, dtype=torch.int64)
    layer, around = poisoned(7, block_bytes)
    twin, around_twin = poisoned(7, block_bytes)
    kernels.scatter(packed, ids, layer)
    scatter_blocks(packed, ids, twin)
    assert torch.equal(layer[ids], packed)
    assert torch.equal(around, around_twin)


@pytest.mark.parametrize("offset", [1, 2, 4, 6])
def test_memory_off_alignment_is_copied_in_smaller_words(kernels: ModuleType, offset: int) -> None:
    ids = torch.tensor([2, 0])
    layer, _ = poisoned(3, 48, offset)
    layer.copy_(bits(3, 48))
    packed, around = poisoned(2, 48, offset)
    kernels.gather(layer, ids, packed)
    assert torch.equal(packed, layer[ids])
    assert around[:offset].eq(POISON).all()
    assert around[offset + 96 :].eq(POISON).all()


def test_shapes_at_random(kernels: ModuleType) -> None:
    chosen = random.Random(7)
    for _ in range(60):
        num_blocks, block_bytes = chosen.randint(1, 30), chosen.randint(1, 9000)
        block_ids = chosen.sample(range(num_blocks), chosen.randint(1, num_blocks))
        layer, ids = bits(num_blocks, block_bytes), torch.tensor(block_ids)
        packed, around = poisoned(len(block_ids), block_bytes)
        kernels.gather(layer, ids, packed)
        assert torch.equal(packed, layer[ids])
        assert around[packed.numel() :].eq(POISON).all()
        target, expected = bits(num_blocks, block_bytes + 1)[:, 1:].contiguous(), bits(num_blocks, block_bytes)
        expected.copy_(target)
        kernels.scatter(packed, ids, target)
        scatter_blocks(packed, ids, expected)
        assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("layer", "block_ids", "packed"),
    [
        (bits(4, 8), torch.tensor([1]), bits(2, 8)),
        (bits(4, 8), torch.tensor([1]), bits(1, 7)),
        (bits(4, 8), torch.tensor([1], dtype=torch.int32), bits(1, 8)),
        (bits(4, 8), torch.tensor([[1]]), bits(1, 8)),
        (bits(4, 8).view(torch.float16), torch.tensor([1]), bits(1, 8).view(torch.float16)),
        (bits(4, 16)[:, ::2], torch.tensor([1]), bits(1, 8)),
        (bits(4, 8), torch.tensor([1]), bits(1, 16)[:, ::2]),
        (bits(4, 8, 1), torch.tensor([1]), bits(1, 8)),
        (bits(4, 8), torch.tensor([1], device="meta"), bits(1, 8)),
    ],
)
def test_what_does_not_fit_is_refused(layer: torch.Tensor, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        gather_blocks(layer, block_ids, packed)
    with pytest.raises(ValueError, match="do not fit together"):
        scatter_blocks(packed, block_ids, layer)
