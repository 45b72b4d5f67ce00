"""KV that arrives while sequences run: a bounded number of bytes is looked at between two steps."""

from collections.abc import Iterator

import pytest

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.mailbox import FromGateway, FromPeer, PieceArrived, ToPeer
from kvrelay.messages import Abort, KVGrant, KVOffer
from kvrelay.transfer.ports import Inlet
from kvrelay.transfer.protocol.piece import PieceHeader, pack, seal
from kvrelay.types import SamplingParams
from kvrelay.worker import MAX_STEP_BYTES
from tests.test_worker import GATEWAY, LAYOUT, Bench
from tests.test_worker import bench as bench_of_worker

SENDER = 2
NUM_BLOCKS = 6


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A worker with a prompt of six blocks on its way to it, and memory for it."""
    for bench in bench_of_worker.__wrapped__():  # type: ignore[attr-defined]
        memory = BlockMemory.create(Geometry(LAYOUT.num_layers, bench.blocks.num_blocks, LAYOUT.block_bytes))
        bench.worker._inlet = Inlet(memory, LAYOUT)
        yield bench


def granted(bench: Bench) -> KVGrant:
    offer = KVOffer(
        source=SENDER,
        target=1,
        request_id="r",
        attempt=0,
        prompt_token_ids=tuple(range(1, 1 + NUM_BLOCKS * LAYOUT.block_size)),
        params=SamplingParams(max_tokens=3),
        gateway=GATEWAY,
        fingerprint="f",
        layout=LAYOUT,
        lease_s=5.0,
    )
    bench.mailbox.deliver(FromPeer(SENDER, offer))
    bench.worker.take_messages(0.0)
    bench.worker.schedule()
    (order,) = [order for order in bench.mailbox.orders() if isinstance(order, ToPeer)]
    assert isinstance(order.message, KVGrant)
    return order.message


def arrive(bench: Bench, grant: KVGrant) -> None:
    """Every block as a piece of its own."""
    payload = bytes(LAYOUT.block_bytes)
    for block in range(NUM_BLOCKS):
        shape = (0, block, 1, 0, LAYOUT.num_kv_heads, LAYOUT.block_size, LAYOUT.dtype, LAYOUT.block_bytes)
        header = PieceHeader(grant.lease_id, SENDER, *shape)
        bench.mailbox.deliver_piece(PieceArrived(SENDER, pack(seal(header, payload)), payload))


def num_landed(bench: Bench) -> int:
    lease = bench.worker._receiver._leases.of_request("r")
    return 0 if lease is None else lease.landed[0].bit_count()


def test_what_is_verified_between_two_steps_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_STEP_BYTES == 8 * 2**20
    monkeypatch.setattr("kvrelay.worker.MAX_STEP_BYTES", 2 * LAYOUT.block_bytes)
    arrive(bench, granted(bench))
    for expected in (2, 4, 6, 6):
        bench.worker.take_messages(0.0)
        assert num_landed(bench) == expected


def test_the_worker_does_not_rest_while_pieces_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.worker.MAX_STEP_BYTES", 1)
    arrive(bench, granted(bench))
    bench.worker.take_messages(0.0)
    assert bench.worker._until_deadline() == 0.0
    for _ in range(NUM_BLOCKS):
        bench.worker.take_messages(0.0)
    assert bench.worker._until_deadline() > 0.0


def test_an_abort_does_not_wait_for_pieces_that_came_before_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.worker.MAX_STEP_BYTES", 1)
    arrive(bench, granted(bench))
    bench.mailbox.deliver(FromGateway(GATEWAY, Abort(source=GATEWAY, target=1, request_id="r", attempt=0)))
    bench.worker.take_messages(0.0)
    assert bench.blocks.ledger.free == bench.blocks.num_blocks
    for _ in range(NUM_BLOCKS):
        bench.worker.take_messages(0.0)
    assert bench.worker._receiver.counters["piece_stale_lease"] == NUM_BLOCKS


def test_garbage_costs_some_of_what_a_step_may_take(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.worker.MAX_STEP_BYTES", 10)
    for _ in range(3):
        bench.mailbox.deliver_piece(PieceArrived(SENDER, b"no header", None))
    bench.worker.take_messages(0.0)
    assert bench.worker._counters["malformed_piece"] == 2
