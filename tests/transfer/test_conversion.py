"""Blocks of one size become blocks of another on arrival: every token's KV lies where it should, and nothing else."""

import numpy as np
import numpy.typing as npt
import pytest

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.blocks import BlockManager
from kvrelay.messages import KVAck, KVCommit, KVGrant, KVOffer, KVRefusal, LeaseId, RefusalReason
from kvrelay.prefixes import Prefixes
from kvrelay.transfer.ports import Inlet, Outlet
from kvrelay.transfer.protocol.actions import Action, Adopt, SendPiece
from kvrelay.transfer.protocol.piece import unpack
from kvrelay.transfer.protocol.receiver import KVReceiver
from kvrelay.transfer.protocol.sender import KVSender
from kvrelay.types import KVLayout, RequestKey, Sequence
from tests.transfer.nouns import FINGERPRINT, LEASE_S, messages, new_peer, new_sequence, of, pieces

P, D = 1, 50
NUM_BLOCKS = 48
SIZES = (8, 16, 24, 32, 48, 64)
PAIRS = [(one, other) for one in SIZES for other in SIZES if one != other and max(one, other) % min(one, other) == 0]


def layout(block_size: int, dtype: str = "bfloat16") -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, block_size=block_size, dtype=dtype)


class Worker:
    """Memory in blocks of some size, full of what must not be taken for a prompt's KV."""

    def __init__(self, layout: KVLayout, poison: int) -> None:
        self.layout = layout
        self.memory = BlockMemory.create(Geometry(2, NUM_BLOCKS, self.layout.block_bytes))
        self.memory.buffer[:] = bytes([poison]) * self.memory.buffer.nbytes
        shape = (2, NUM_BLOCKS, 2, 3, layout.block_size, layout.row_bytes)
        self.array = np.frombuffer(self.memory.buffer, np.uint8).reshape(shape)
        self.blocks = BlockManager(NUM_BLOCKS, layout.block_size)

    def tokens(self, sequence: Sequence) -> npt.NDArray[np.uint8]:
        """What lies in a sequence's blocks: `[layers, 2, heads, tokens, row_bytes]`, the last block to its end."""
        blocks = self.array[:, sequence.block_table]
        return np.concatenate([blocks[:, index] for index in range(blocks.shape[1])], axis=-2)


class Pair:
    """A sender and a receiver that hold blocks of different sizes."""

    def __init__(self, sends: int, receives: int, dtype: str = "bfloat16") -> None:
        self.here, self.there = Worker(layout(sends, dtype), 0x11), Worker(layout(receives, dtype), 0xEE)
        self.sender = KVSender(incarnation=P, layout=self.here.layout, fingerprint=FINGERPRINT, lease_s=LEASE_S)
        self.receiver = KVReceiver(
            incarnation=D,
            layout=self.there.layout,
            fingerprint=FINGERPRINT,
            blocks=self.there.blocks,
            max_model_len=2_000,
            max_queue=4,
            max_lease_s=LEASE_S,
            prefixes=Prefixes(self.there.blocks, FINGERPRINT),
        )
        self.receiver.on_memory_shared(P)
        self.outlet = Outlet(self.here.memory, lambda _: self.there.memory)
        self.inlet = Inlet(self.there.memory, self.there.layout)

    def hand_over(self, name: str, num_tokens: int) -> tuple[Sequence, Sequence, list[SendPiece]]:
        """A prompt as it was, as it arrived, and the pieces in which it went."""
        sequence = new_sequence(RequestKey(name, 1), num_tokens)
        sequence.block_table = self.here.blocks.allocate(self.here.layout.num_blocks(num_tokens))
        self._compute(sequence)
        offer = messages(self.sender.offer(sequence, (new_peer(D),), 1, 0.0), KVOffer)[0]
        assert self.receiver.on_message(P, offer, 0.0) == []
        grant = messages(self.receiver.grant(NUM_BLOCKS, 1, 0.0), KVGrant)[0]
        assert not grant.one_sided, "a sender cannot write blocks of its size into memory of blocks of another"
        assert self.sender.on_message(D, grant, 0.0) == []
        self.sender.commit(sequence.key, (7,), 0.0)
        sent = self.sender.next_pieces(2**24, 0.0)
        adopted = [action for piece in reversed(pieces(sent)) for action in self._land(piece)]
        adopted += self.receiver.on_message(P, messages(sent, KVCommit)[0], 0.0)
        assert self.sender.on_message(D, messages(adopted, KVAck)[0], 0.0)
        self.here.blocks.release(sequence.block_table)
        return sequence, of(adopted, Adopt)[0].sequence, pieces(sent)

    def _compute(self, sequence: Sequence) -> None:
        """Numbers that say whose they are, where the prompt is, and zeros behind it."""
        size, length = self.here.layout.block_size, sequence.num_prompt_tokens
        for position in range(len(sequence.block_table) * size):
            place = self.here.array[:, sequence.block_table[position // size], :, :, position % size]
            numbers = np.arange(place.size, dtype=np.uint8).reshape(place.shape)
            place[:] = 0 if position >= length else numbers + np.uint8(61 * (position + 1) % 256)

    def _land(self, piece: SendPiece) -> list[Action]:
        packed, payload = self.outlet.take(piece)
        header = unpack(packed)
        place = self.receiver.accept(P, header)
        assert place is not None
        assert self.inlet.land(header, place, payload)
        return self.receiver.landed(header, 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("sends", "receives"), PAIRS)
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 63, 64, 65, 129, 200])
def test_every_token_arrives_where_it_should_and_zeros_follow_the_last(
    sends: int, receives: int, num_tokens: int, dtype: str
) -> None:
    """Pieces of a few kilobytes, the last one first."""
    pair = Pair(sends, receives, dtype)
    pair.sender._max_piece_blocks = 2
    sequence, adopted, _ = pair.hand_over("r", num_tokens)
    expected, arrived = pair.here.tokens(sequence), pair.there.tokens(adopted)
    assert arrived.shape[-2] == pair.there.layout.num_blocks(num_tokens) * receives
    assert np.array_equal(arrived[..., :num_tokens, :], expected[..., :num_tokens, :])
    assert not arrived[..., num_tokens:, :].any()
    others = set(range(NUM_BLOCKS)) - set(adopted.block_table)
    assert (pair.there.array[:, sorted(others)] == 0xEE).all(), "no other block is touched"


@pytest.mark.parametrize(("sends", "receives"), PAIRS)
def test_what_the_receiver_holds_is_not_sent_in_whole_blocks_of_either(sends: int, receives: int) -> None:
    pair = Pair(sends, receives)
    _, first, _ = pair.hand_over("shared.1", 5 * receives + 1)
    pair.there.blocks.release(first.block_table)
    length = 5 * receives + 9
    sequence, second, sent = pair.hand_over("shared.2", length)
    num_held = len(set(first.block_table) & set(second.block_table))
    step = max(sends, receives)
    assert num_held * receives == 5 * receives // step * step
    assert sum(len(piece.header.layers) * piece.header.num_blocks for piece in sent) == 2 * (
        -(-length // sends) - num_held * receives // sends
    )
    assert np.array_equal(pair.there.tokens(second)[..., :length, :], pair.here.tokens(sequence)[..., :length, :])


@pytest.mark.parametrize(("sends", "receives"), [(16, 24), (24, 16), (64, 48)])
def test_sizes_that_do_not_fit_are_refused_with_a_reason(sends: int, receives: int) -> None:
    pair = Pair(sends, receives)
    offer = messages(pair.sender.offer(new_sequence(RequestKey("r", 1), 5), (new_peer(D),), 1, 0.0), KVOffer)[0]
    refusal = messages(pair.receiver.on_message(P, offer, 0.0), KVRefusal)[0]
    assert refusal.reason is RefusalReason.INCOMPATIBLE
    assert f"hold {sends} tokens, the receiver's {receives}: one must be a multiple of the other" in refusal.message


@pytest.mark.parametrize("block_size", [24, 16])
def test_a_grant_in_blocks_that_do_not_fit_is_turned_down(block_size: int) -> None:
    """16 would fit, but half a block of ours cannot be held."""
    sender = KVSender(incarnation=P, layout=layout(32), fingerprint=FINGERPRINT, lease_s=LEASE_S)
    sender.offer(new_sequence(RequestKey("r", 1), 48), (new_peer(D),), 1, 0.0)
    grant = KVGrant(
        source=D,
        target=P,
        request_id="r",
        attempt=1,
        lease_id=LeaseId(D, 1),
        block_ids=tuple(range(48 // block_size)),
        block_size=block_size,
        held_blocks=1,
    )
    actions = sender.on_message(D, grant, 0.0)
    assert sender.counters["malformed_grant"] == 1
    assert [type(action).__name__ for action in actions] == ["Send", "Failed"]
