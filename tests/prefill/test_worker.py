"""What a prefill worker sends between two looks at messages, without a network."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.blocks import BlockManager
from kvrelay.mailbox import Mailbox, Order, SendPayload, ToPeer
from kvrelay.messages import KVCommit, KVGrant, LeaseId
from kvrelay.outputs import OutputStore
from kvrelay.prefill import worker as prefill_worker
from kvrelay.prefill.worker import PrefillWorker
from kvrelay.transfer.ports import Outlet
from kvrelay.transfer.protocol.sender import KVSender
from kvrelay.types import RequestKey
from kvrelay.worker import WorkerContext
from tests.transfer.nouns import LAYOUT, new_peer, new_sender, new_sequence

P, D, NOW = 1, 50, 100.0
KEY = RequestKey("r", 1)
BLOCKS = 4


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


def granted() -> KVSender:
    """A sender with a whole prompt to push."""
    sender = new_sender(P, max_piece_bytes=LAYOUT.block_bytes)
    num_tokens = BLOCKS * LAYOUT.block_size
    sender.offer(new_sequence(KEY, num_tokens, block_table=range(BLOCKS)), (new_peer(D),), 1, NOW)
    sender.commit(KEY, (1,), NOW)
    block_ids = tuple(range(BLOCKS))
    grant = KVGrant(
        source=D,
        target=P,
        request_id="r",
        attempt=1,
        lease_id=LeaseId(D, 1),
        block_ids=block_ids,
        block_size=LAYOUT.block_size,
    )
    sender.on_message(D, grant, NOW)
    return sender


def new_worker(mailbox: Mailbox, sender: KVSender) -> PrefillWorker:
    context = WorkerContext(mailbox, OutputStore(60.0, 100), incarnation=P, vocab_size=1000, clock=lambda: NOW)
    memory = BlockMemory.create(Geometry(LAYOUT.num_layers, BLOCKS, LAYOUT.block_bytes))
    nothing = cast(Any, None)
    return PrefillWorker(
        context, nothing, nothing, sender, Outlet(memory, lambda _: None), BlockManager(BLOCKS, LAYOUT.block_size), 30.0
    )


def test_a_long_prompt_leaves_in_parts_without_a_wait_in_between(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker, "MAX_TAKEN_BYTES", 3 * LAYOUT.block_bytes)
    worker = new_worker(mailbox, granted())
    sent: list[Order] = []
    for _ in range(3):
        assert worker._until_deadline() == 0.0
        worker.tick(NOW)
        parts = mailbox.orders()
        assert 0 < sum(isinstance(order, SendPayload) for order in parts) <= 3
        sent += parts
    assert worker._until_deadline() > 0.0
    assert len([order for order in sent if isinstance(order, SendPayload)]) == BLOCKS * LAYOUT.num_layers
    assert isinstance(sent[-1], ToPeer)
    assert isinstance(sent[-1].message, KVCommit)


def test_a_worker_whose_receiver_is_slow_waits_until_there_is_room(mailbox: Mailbox) -> None:
    worker = new_worker(mailbox, granted())
    waiting = SendPayload(new_peer(D), b"", bytes(mailbox.payload_room), NOW)
    mailbox.post([waiting])
    assert worker._until_deadline() > 0.0
    mailbox.payload_done([waiting])
    assert worker._until_deadline() == 0.0
