"""Memory of KV blocks that processes share: what is mapped, what is refused, what it costs, and what is left of it."""

import gc
import os
import signal
import subprocess
import sys

import pytest

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.errors import WireError

SMALL = Geometry(num_layers=2, num_blocks=5, block_bytes=3)
LEFTOVERS = ("/dev/shm", "/tmp")


def test_a_new_memory_is_zeros() -> None:
    assert bytes(BlockMemory.create(SMALL).buffer) == bytes(30)


def test_blocks_lie_one_after_the_other_layer_by_layer() -> None:
    memory = BlockMemory.create(SMALL)
    memory.buffer[:] = bytes(range(30))
    assert [bytes(view) for view in memory.views(1, (1, 2, 4, 0))] == [
        bytes(range(18, 24)),
        bytes(range(27, 30)),
        bytes(range(15, 18)),
    ]
    assert memory.views(0, ()) == []


def test_what_is_written_lies_in_the_blocks_named_and_nowhere_else() -> None:
    memory = BlockMemory.create(SMALL)
    memory.write(1, (3, 0, 1), b"abcdefghi")
    assert bytes(memory.buffer) == bytes(15) + b"defghi" + bytes(3) + b"abc" + bytes(3)


@pytest.mark.parametrize("parts", [(b"ab", b"cdefgh", b"", b"i"), (b"", b"abcdefghi"), (b"abc", b"def", b"ghi")])
def test_it_does_not_matter_how_the_bytes_are_split(parts: tuple[bytes, ...]) -> None:
    memory = BlockMemory.create(SMALL)
    memory.write(1, (3, 0, 1), *parts)
    assert bytes(memory.buffer) == bytes(15) + b"defghi" + bytes(3) + b"abc" + bytes(3)


def test_whether_blocks_take_so_many_bytes() -> None:
    memory = BlockMemory.create(SMALL)
    assert memory.holds(1, (0, 4), 6)
    assert not memory.holds(1, (0, 4), 7)
    assert not memory.holds(1, (0, 5), 6)
    assert not memory.holds(2, (0, 4), 6)


@pytest.mark.parametrize(("layer", "block_ids"), [(2, (0,)), (-1, (0,)), (0, (5,)), (0, (0, -1))])
def test_blocks_that_do_not_exist_are_refused(layer: int, block_ids: tuple[int, ...]) -> None:
    memory = BlockMemory.create(SMALL)
    with pytest.raises(IndexError, match="exist"):
        memory.views(layer, block_ids)
    with pytest.raises(IndexError, match="exist"):
        memory.write(layer, block_ids, bytes(3 * len(block_ids)))


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(WireError, match="4 bytes, but 3 were expected"):
        BlockMemory.create(SMALL).write(0, (0,), b"abcd")


def test_another_mapping_sees_the_same_bytes() -> None:
    memory = BlockMemory.create(SMALL)
    other = BlockMemory.open(SMALL, os.dup(memory.descriptor))
    other.write(0, (2,), b"xyz")
    assert bytes(memory.views(0, (2,))[0]) == b"xyz"


def test_the_size_is_sealed_so_that_no_mapping_can_fault() -> None:
    memory = BlockMemory.create(SMALL)
    for size in (0, 29, 31):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)


@pytest.mark.parametrize("geometry", [Geometry(2, 5, 4), Geometry(1, 5, 3), Geometry(0, 5, 3)])
def test_memory_of_another_size_is_refused(geometry: Geometry) -> None:
    memory = BlockMemory.create(SMALL)
    descriptor = os.dup(memory.descriptor)
    with pytest.raises(WireError, match="no sealed memory"):
        BlockMemory.open(geometry, descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_that_could_shrink_is_refused() -> None:
    shrinking = os.memfd_create("x")
    os.ftruncate(shrinking, SMALL.num_bytes)
    pipes = os.pipe()
    for descriptor in (shrinking, *pipes):
        with pytest.raises(WireError, match="no sealed memory"):
            BlockMemory.open(SMALL, descriptor)


def test_untouched_blocks_cost_nothing() -> None:
    memory = BlockMemory.create(Geometry(num_layers=4, num_blocks=2**16, block_bytes=2**14))  # 4 GiB
    assert os.fstat(memory.descriptor).st_blocks == 0
    memory.write(2, (7,), bytes(2**14))
    assert os.fstat(memory.descriptor).st_blocks * 512 <= 2**21  # a huge page at most


def test_the_descriptor_goes_with_the_memory() -> None:
    memory = BlockMemory.create(SMALL)
    view, descriptor = memory.views(0, (0,))[0], memory.descriptor
    del memory
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    view[:] = b"abc"  # whoever still looks at it may


def test_a_killed_process_leaves_nothing() -> None:
    before = {folder: set(os.listdir(folder)) for folder in LEFTOVERS}
    program = (
        "from kvrelay.block_memory import BlockMemory, Geometry\n"
        "memory = BlockMemory.create(Geometry(1, 8, 4096))\n"
        "memory.write(0, (0,), bytes(4096))\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    kvrelay = [name for folder in LEFTOVERS for name in set(os.listdir(folder)) - before[folder] if "kvrelay" in name]
    assert kvrelay == []
