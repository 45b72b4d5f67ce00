"""The kernels on a real GPU, bit for bit against their twins on the CPU."""

import pytest
import torch

from kvrelay.kernels.block_copy import gather_blocks, scatter_blocks
from kvrelay.kernels.digest import digest_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
POISON = 0xA5


def bits(*shape: int) -> torch.Tensor:
    """Any bits, on the CPU."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("block_bytes", [1, 3, 6, 12, 40, 8191, 8192, 8193, 12288, 65536])
@pytest.mark.parametrize("block_ids", [[4], [0, 1, 2], [5, 0, 3], [6, 5, 4, 3, 2, 1, 0], []])
def test_blocks_are_packed_and_unpacked(block_bytes: int, block_ids: list[int]) -> None:
    layer, ids = bits(7, block_bytes), torch.tensor(block_ids, dtype=torch.int64)
    packed = torch.full((len(block_ids), block_bytes), POISON, dtype=torch.uint8, device="cuda")
    gather_blocks(layer.cuda(), ids.cuda(), packed)
    assert torch.equal(packed.cpu(), layer[ids])
    target = torch.full((7, block_bytes), POISON, dtype=torch.uint8, device="cuda")
    expected = target.cpu().index_copy_(0, ids, layer[ids])
    scatter_blocks(packed, ids.cuda(), target)
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_memory_off_alignment_is_copied_in_smaller_words(offset: int) -> None:
    around = torch.full((offset + 3 * 48,), POISON, dtype=torch.uint8, device="cuda")
    layer, ids = around[offset:].view(3, 48), torch.tensor([2, 0])
    scatter_blocks(bits(2, 48).cuda(), ids.cuda(), layer)
    assert around[:offset].eq(POISON).all()
    assert torch.equal(layer[ids.cuda()].cpu(), bits(2, 48))
    packed = torch.empty((2, 48), dtype=torch.uint8, device="cuda")
    gather_blocks(layer, ids.cuda(), packed)
    assert torch.equal(packed.cpu(), bits(2, 48))


def test_blocks_beyond_32_bits_are_found() -> None:
    """8-byte words from 2**31 on: the last of as many blocks as 18 GiB hold, if the GPU has room for them."""
    block_bytes, num_blocks = 1 << 20, (2**31 * 8 >> 20) + 2
    if torch.cuda.mem_get_info()[0] < num_blocks * block_bytes + (1 << 30):
        pytest.skip("the GPU has less than 18 GiB free")
    layer = torch.empty((num_blocks, block_bytes), dtype=torch.uint8, device="cuda")
    ids = torch.tensor([num_blocks - 1, 1]).cuda()
    scatter_blocks(bits(2, block_bytes).cuda(), ids, layer)
    assert torch.equal(layer[num_blocks - 1].cpu(), bits(2, block_bytes)[0])
    packed = torch.empty((2, block_bytes), dtype=torch.uint8, device="cuda")
    gather_blocks(layer, ids, packed)
    assert torch.equal(packed.cpu(), bits(2, block_bytes))


@pytest.mark.parametrize("num_bytes", [4, 12, 8192, 8196, 1 << 21, (1 << 26) + 4])
def test_a_digest_is_that_of_the_cpu(num_bytes: int) -> None:
    content, found, expected = bits(num_bytes), torch.full((1,), 9, device="cuda"), torch.empty(1, dtype=torch.int64)
    digest_bytes(content, expected)
    for _ in range(3):  # programs end in another order each time
        digest_bytes(content.cuda(), found)
        assert torch.equal(found.cpu(), expected)
