"""KV of a device on its way through staging buffers: which bytes, in which order with computation, in how much room."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.kernels.digest import digest_bytes
from kvrelay.model.staging import StagedMemory
from kvrelay.model.streams import HostStreams
from kvrelay.transfer.ports import Inlet, Outlet
from kvrelay.transfer.protocol.lease import Place
from kvrelay.transfer.protocol.piece import unpack
from tests.transfer.nouns import LAYOUT
from tests.transfer.test_ports import BLOCK_IDS, TARGETS, content, memory, piece

LAYERS, BLOCKS, BLOCK_BYTES = 2, 9, 28
POISON = 0xA5


def device_memory(seed: int, block_bytes: int = BLOCK_BYTES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (LAYERS, BLOCKS, block_bytes), dtype=torch.uint8, generator=generator)


def on_device(memory: BlockMemory) -> StagedMemory:
    """The same memory, taken for a device's."""
    content = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    return StagedMemory(content.view(memory.geometry.num_layers, memory.geometry.num_blocks, -1), HostStreams())


def zeros(num_bytes: int) -> DeviceBytes:
    return DeviceBytes(torch.zeros(num_bytes, dtype=torch.uint8))


class LazyStreams(HostStreams):
    """The network's queue is worked off only as far as somebody waits for it, so that what is not waited for shows.

    Copies are done at once; `events` tells when later computation was made to wait for them, and what the host waited
    for.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.buffer_bytes = 0
        self._queue: deque[Callable[[], object]] = deque()
        self._num_done = self._num_copied = 0
        self._inside = False

    def compute(self, work: Callable[[], object]) -> None:
        """Queues work of the network."""
        self._queue.append(work)

    def computed(self) -> "ComputeMark":
        assert not self._inside, "the current stream is that of the copies here"
        return ComputeMark(self, self._num_done + len(self._queue))

    def copied(self) -> "CopyMark":
        self._num_copied += 1
        return CopyMark(self, self._num_copied)

    def compute_after(self, mark: object) -> None:
        assert isinstance(mark, CopyMark)
        self.events.append(f"computation waits for copies {mark.number}")

    def copy_after(self, mark: object) -> None:
        assert isinstance(mark, ComputeMark)
        mark.synchronize()

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._inside = True
        yield
        self._inside = False

    def host_buffer(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        self.buffer_bytes += num_rows * row_bytes
        return super().host_buffer(num_rows, row_bytes).fill_(POISON)

    def upload(self, block_ids: Sequence[int]) -> torch.Tensor:
        assert self._inside
        return super().upload(block_ids)

    def retain(self, tensor: torch.Tensor) -> None:
        self.events.append("retained")

    def work_off(self, end: int) -> None:
        while self._num_done < end:
            self._queue.popleft()()
            self._num_done += 1


class ComputeMark:
    """Behind the first so much work of the network."""

    def __init__(self, streams: LazyStreams, end: int) -> None:
        self._streams, self._end = streams, end

    def wait(self, stream: object) -> None:
        raise AssertionError("the streams do this")

    def synchronize(self) -> None:
        self._streams.work_off(self._end)


class CopyMark:
    """Behind the copies queued until it was made."""

    def __init__(self, streams: LazyStreams, number: int) -> None:
        self.number, self._streams = number, streams

    def wait(self, stream: object) -> None:
        raise AssertionError("the streams do this")

    def synchronize(self) -> None:
        self._streams.events.append(f"host waits for copies {self.number}")


@pytest.mark.parametrize("block_bytes", [1, 3, 30, 64, 4097])
@pytest.mark.parametrize("budget", [0, 100, 1000, 1 << 20])
@pytest.mark.parametrize("block_ids", [[4], [0, 1, 2], [5, 0, 3], [8, 7, 6, 5, 4, 3, 2, 1, 0], []])
def test_blocks_come_back_as_they_left(block_bytes: int, budget: int, block_ids: list[int]) -> None:
    source, target = device_memory(1, block_bytes), device_memory(2, block_bytes)
    expected = target.clone()
    moved_to = [8 - block_id for block_id in block_ids]
    expected[1, moved_to] = source[1, block_ids]
    payload = b"".join(StagedMemory(source, LazyStreams(), budget).views(1, block_ids))
    assert payload == source[1, block_ids].numpy().tobytes()
    StagedMemory(target, LazyStreams(), budget).write(1, moved_to, payload)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("block_ids", [[4], [5, 0, 3], []])
def test_blocks_move_on_the_device_alone(block_ids: list[int]) -> None:
    source, target = device_memory(1), device_memory(2)
    expected = target.clone()
    expected[0, block_ids] = source[1, block_ids]
    packed, digest = StagedMemory(source, HostStreams()).gather(range(1, 2), block_ids)
    assert torch.equal(packed.tensor.view(-1, BLOCK_BYTES), source[1, block_ids])
    there = StagedMemory(target, HostStreams())
    assert there.digest(packed) == digest
    there.scatter(range(1), block_ids, packed)
    assert torch.equal(target, expected)


def test_blocks_of_several_layers_move_together() -> None:
    source, target = device_memory(1), device_memory(2)
    expected = target.clone()
    expected[:, [2, 0, 7]] = source[:, [5, 0, 3]]
    packed, _ = StagedMemory(source, HostStreams()).gather(range(LAYERS), [5, 0, 3])
    StagedMemory(target, HostStreams()).scatter(range(LAYERS), [2, 0, 7], packed)
    assert torch.equal(target, expected)


def test_a_digest_is_told_as_it_is_sent_and_whoever_packed_it() -> None:
    staged, expected = StagedMemory(device_memory(1), HostStreams()), torch.empty(1, dtype=torch.int64)
    packed, digest = staged.gather(range(1), [4, 2])
    digest_bytes(packed.tensor, expected)
    assert digest == int(expected).to_bytes(8, "little", signed=True)
    packed.tensor[3] ^= 4
    assert staged.digest(packed) != digest


def test_what_is_fetched_is_on_the_host() -> None:
    packed, _ = StagedMemory(device_memory(1), HostStreams()).gather(range(1), [4, 2])
    assert StagedMemory(device_memory(1), HostStreams()).fetch(packed) == packed.tensor.numpy().tobytes()


def test_a_device_without_room_is_a_wire_error(monkeypatch: pytest.MonkeyPatch) -> None:
    room = StagedMemory(device_memory(1), HostStreams()).room
    assert len(room.take(1000)) == 1000

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(WireError, match="no room for 1000 bytes"):
        room.take(1000)


def test_a_piece_goes_from_device_to_device_through_the_host() -> None:
    there, expected = memory(100), memory(100)
    header, payload = Outlet(on_device(memory(10)), lambda _: None).take(piece(one_sided=False))
    assert payload == content(memory(10), BLOCK_IDS)
    assert Inlet(on_device(there), LAYOUT).land(unpack(header), Place(TARGETS), payload)
    expected.write(1, TARGETS, payload)
    assert bytes(there.buffer) == bytes(expected.buffer)


def test_a_piece_that_stays_on_devices_is_written_once_its_digest_is_right() -> None:
    here, there = on_device(memory(10)), memory(100)
    inlet = Inlet(on_device(there), LAYOUT, on_device(there))
    header, payload = Outlet(here, lambda _: None, lambda _: here).take(piece(one_sided=False))
    assert isinstance(payload, DeviceBytes)
    payload.tensor[-1] ^= 1
    assert not inlet.land(unpack(header), Place(TARGETS), payload)
    assert bytes(there.buffer) == bytes(memory(100).buffer)
    payload.tensor[-1] ^= 1
    assert inlet.land(unpack(header), Place(TARGETS), payload)
    expected = memory(100)
    expected.write(1, TARGETS, content(memory(10), BLOCK_IDS))
    assert bytes(there.buffer) == bytes(expected.buffer)


def test_a_piece_on_a_device_is_converted_as_any_other() -> None:
    layout = LAYOUT.model_copy(update={"block_size": 2 * LAYOUT.block_size})
    geometry = Geometry(layout.num_layers, 4, layout.block_bytes)
    by_host, by_device = BlockMemory.create(geometry), BlockMemory.create(geometry)
    here, there, place = on_device(memory(10)), on_device(by_device), Place((2, 0), 2, is_end=True)
    for outlet, inlet in (
        (Outlet(here, lambda _: None), Inlet(by_host, layout)),
        (Outlet(here, lambda _: None, lambda _: here), Inlet(there, layout, there)),
    ):
        header, payload = outlet.take(piece(one_sided=False))
        assert inlet.land(unpack(header), place, payload)
    assert bytes(by_device.buffer) == bytes(by_host.buffer) != bytes(geometry.num_bytes)


def test_a_piece_on_a_device_is_nothing_to_a_worker_without_one() -> None:
    here, there = on_device(memory(10)), memory(100)
    header, payload = Outlet(here, lambda _: None, lambda _: here).take(piece(one_sided=False))
    assert not Inlet(there, LAYOUT).land(unpack(header), Place(TARGETS), payload)
    assert bytes(there.buffer) == bytes(memory(100).buffer)


def test_a_piece_goes_from_a_device_into_memory_that_is_shared() -> None:
    there = memory(100)
    _, payload = Outlet(on_device(memory(10)), lambda _: there).take(piece(one_sided=True))
    assert payload is None
    assert content(there, TARGETS) == content(memory(10), BLOCK_IDS)


def read_blocks(staged: StagedMemory, read: str, block_ids: list[int]) -> bytes:
    """Of layer 0."""
    if read == "views":
        return bytes(staged.views(0, block_ids)[0])
    packed, _ = staged.gather(range(1), block_ids)
    return bytes(packed.tensor.numpy())


@pytest.mark.parametrize("read", ["views", "gather"])
def test_what_leaves_waits_for_its_layer_and_for_no_later_one(read: str) -> None:
    kv, streams, fresh = device_memory(1), LazyStreams(), device_memory(2)
    before, staged = kv.clone(), StagedMemory(kv, streams)
    for layer in range(LAYERS):
        streams.compute(partial(kv[layer].copy_, fresh[layer]))
        staged.computed(layer)
    found = read_blocks(staged, read, [3, 1])
    assert found == fresh[0, [3, 1]].numpy().tobytes()
    assert torch.equal(kv[1], before[1])
    assert streams.events == ["host waits for copies 1"]


@pytest.mark.parametrize("read", ["views", "gather"])
def test_what_leaves_waits_for_all_when_nobody_said_what_was_computed(read: str) -> None:
    kv, streams = device_memory(1), LazyStreams()
    streams.compute(lambda: kv.fill_(7))
    staged = StagedMemory(kv, streams)
    assert read_blocks(staged, read, [3]) == bytes([7]) * BLOCK_BYTES


@pytest.mark.parametrize("write", ["write", "scatter"])
def test_what_enters_waits_for_earlier_steps_and_later_ones_wait_for_it(write: str) -> None:
    kv, streams, seen = device_memory(1), LazyStreams(), list[torch.Tensor]()
    staged, before = StagedMemory(kv, streams), kv.clone()
    streams.compute(lambda: seen.append(kv.clone()))
    packed = torch.full((2, BLOCK_BYTES), 7, dtype=torch.uint8)
    if write == "write":
        staged.write(0, [3, 1], packed.numpy().tobytes())
    else:
        staged.scatter(range(1), [3, 1], DeviceBytes(packed.view(-1)))
    assert torch.equal(seen[0], before)
    assert kv[0, [3, 1]].eq(7).all()
    assert streams.events[-1] == "computation waits for copies 1"
    assert "host waits for copies 1" not in streams.events


def test_memory_that_is_scattered_may_be_freed_at_once_and_the_host_waits_for_nothing() -> None:
    streams = LazyStreams()
    StagedMemory(device_memory(1), streams).scatter(range(1), [3], zeros(BLOCK_BYTES))
    assert streams.events == ["retained", "computation waits for copies 1"]


def test_a_buffer_is_used_again_when_its_copies_are_done() -> None:
    streams = LazyStreams()
    staged = StagedMemory(device_memory(1), streams, 4 * BLOCK_BYTES)
    for block_id in range(4):
        staged.write(0, [block_id], bytes(BLOCK_BYTES))
    assert not [event for event in streams.events if "host" in event]
    staged.write(0, [4], bytes(BLOCK_BYTES))
    staged.views(0, [4])
    assert [event for event in streams.events if "host" in event][:2] == [
        "host waits for copies 1",
        "host waits for copies 2",
    ]


def test_a_payload_larger_than_all_buffers_goes_through_them_in_turn() -> None:
    streams = LazyStreams()
    staged = StagedMemory(device_memory(1), streams, 4 * 2 * BLOCK_BYTES)
    staged.write(0, range(BLOCKS), bytes(BLOCKS * BLOCK_BYTES))
    assert [event for event in streams.events if "host" in event] == ["host waits for copies 1"]


@pytest.mark.parametrize("budget", [0, 100, 500, 1 << 20])
def test_buffers_take_what_they_may_and_never_more(budget: int) -> None:
    streams = LazyStreams()
    staged = StagedMemory(device_memory(1), streams, budget)
    assert streams.buffer_bytes <= max(budget, 4 * BLOCK_BYTES) + 8  # and a digest
    before = streams.buffer_bytes
    for _ in range(3):
        staged.write(1, range(BLOCKS), b"".join(staged.views(0, range(BLOCKS))))
        staged.scatter(range(1, 2), [2], staged.gather(range(1), [1])[0])
    assert streams.buffer_bytes == before


@pytest.mark.parametrize("change", [-1, 1, BLOCK_BYTES])
def test_a_payload_of_another_size_is_refused_and_changes_nothing(change: int) -> None:
    kv = device_memory(1)
    before = kv.clone()
    staged = StagedMemory(kv, HostStreams())
    with pytest.raises(WireError, match="were expected"):
        staged.write(0, [1, 2], bytes(2 * BLOCK_BYTES + change))
    with pytest.raises(WireError, match="were expected"):
        staged.scatter(range(1), [1, 2], zeros(2 * BLOCK_BYTES + change))
    assert torch.equal(kv, before)


@pytest.mark.parametrize(("layer", "block_id"), [(LAYERS, 0), (-1, 0), (0, BLOCKS), (0, -1)])
def test_blocks_and_layers_that_do_not_exist_are_refused(layer: int, block_id: int) -> None:
    staged = StagedMemory(device_memory(1), HostStreams())
    layers = range(layer, layer + 1)
    for call in (
        lambda: staged.views(layer, [block_id]),
        lambda: staged.gather(layers, [block_id]),
        lambda: staged.write(layer, [block_id], bytes(BLOCK_BYTES)),
        lambda: staged.scatter(layers, [block_id], zeros(BLOCK_BYTES)),
    ):
        with pytest.raises(IndexError, match="exist"):
            call()
