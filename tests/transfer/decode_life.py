"""One life of a decode worker of a world, around a real receiver."""

from itertools import product

from kvrelay.blocks import BlockManager
from kvrelay.encoding import decode
from kvrelay.errors import WireError
from kvrelay.messages import (
    Abort,
    KVAck,
    KVCommit,
    KVGrant,
    KVOffer,
    KVRefusal,
    KVReject,
    KVReleased,
    KVRepair,
    LeaseId,
    Peer,
)
from kvrelay.prefixes import Prefixes
from kvrelay.transfer.protocol.actions import Action, Adopt, DropSequence, Failed, Send, SendPiece
from kvrelay.transfer.protocol.piece import HEADER_BYTES, PieceHeader, is_intact, unpack
from kvrelay.types import RequestKey, Sequence
from tests.transfer.network import Flight
from tests.transfer.nouns import (
    FINGERPRINT,
    GATEWAY,
    LAYOUT,
    LEASE_S,
    NUM_BLOCKS,
    new_peer,
    new_receiver,
    new_sequence,
    true_kv,
)
from tests.transfer.stage import Memory, Stage, wipe


class Decode:
    """Lets sequences run, and does what its receiver says."""

    def __init__(self, name: str, stage: Stage) -> None:
        self.name = name
        self.incarnation = stage.new_incarnation()
        self.memory: Memory = {}
        self.running: dict[RequestKey, Sequence] = {}
        self.grants: dict[LeaseId, tuple[KVGrant, int]] = {}
        self.blocks = BlockManager(NUM_BLOCKS, LAYOUT.block_size)
        prefixes = Prefixes(self.blocks, FINGERPRINT)
        self.receiver = new_receiver(self.incarnation, self.blocks, prefixes=prefixes)
        self._stage = stage
        self._rate = 1.03 if name == "d0" else 0.98
        self._newest_grant: dict[int, LeaseId] = {}  # who was last given each block
        self._aborted: dict[str, tuple[int, float]] = {}

    @property
    def peer(self) -> Peer:
        """Where senders find it."""
        return new_peer(self.incarnation, self.name)

    @property
    def now(self) -> float:
        """Its own monotonic clock."""
        return self._stage.now * self._rate

    # what a scheduler does

    def grant(self, max_blocks: int, max_sequences: int) -> None:
        """So much room there is."""
        self.do(self.receiver.grant(max_blocks, max_sequences, self.now))

    def finish(self) -> None:
        """The oldest running sequence ends."""
        if self.running:
            key = next(iter(self.running))
            self.blocks.release(self.running.pop(key).block_table)
            if self._stage.fates.is_newest(key):
                self._stage.fates.end(key.request_id, "finished")

    def tick(self) -> None:
        """Looks at its clock."""
        self.do(self.receiver.tick(self.now))

    # what a worker does

    def arrive(self, flight: Flight) -> None:
        """Something comes from the network."""
        if flight.is_piece:
            self._land(flight)
            return
        try:
            message = decode(flight.frame)
        except WireError:
            self._stage.log["malformed"] += 1
            return
        match message:
            case Abort() if flight.source == GATEWAY:
                self._note_aborted(message)
                self.do(self.receiver.abort(message.key, self.now))
            case KVOffer() | KVCommit() | KVReleased() | Abort():
                if isinstance(message, KVOffer) and self._stage.is_writer(flight.source):
                    self.receiver.on_memory_shared(flight.source)
                if isinstance(message, Abort) and message.target == self.incarnation:
                    self._note_aborted(message)
                self.do(self.receiver.on_message(flight.source, message, self.now))
            case _:
                raise AssertionError(f"{message} came to a receiver")

    def _note_aborted(self, abort: Abort) -> None:
        known = self._aborted.get(abort.request_id, (-1, 0.0))
        self._aborted[abort.request_id] = max(known, (abort.attempt, self.now))

    def do(self, actions: list[Action]) -> None:
        """What its receiver says."""
        for action in actions:
            match action:
                case Send(peer, message):
                    assert isinstance(peer, int), "a receiver answers whom it heard"
                    self._note_answered(peer, action)
                    self._stage.network.say(self.incarnation, peer, message, self._stage.now)
                case Adopt(sequence, peer):
                    self._adopt(sequence, peer)
                case DropSequence(key):
                    for running in [known for known in self.running if key.covers(known)]:
                        self.blocks.release(self.running.pop(running).block_table)
                        self._stage.fates.end(running.request_id, "dropped")
                case Failed():
                    self._stage.fates.note_failed(action)
                case _:
                    raise AssertionError(f"{action} is not a receiver's")

    def _note_answered(self, peer: int, action: Send) -> None:
        if not isinstance(action.message, KVGrant):
            assert isinstance(action.message, KVRefusal | KVRepair | KVAck | KVReject)
            return
        grant = action.message
        if grant.lease_id not in self.grants:
            self._note_new_grant(grant)
        self.grants.setdefault(grant.lease_id, (grant, peer))
        assert self.grants[grant.lease_id] == (grant, peer), "the same lease, two grants"
        for block_id in grant.block_ids[grant.held_blocks :]:
            newest = self._newest_grant.get(block_id, grant.lease_id)
            assert newest.counter <= grant.lease_id.counter, "an old lease's blocks are given to another"
            self._newest_grant[block_id] = grant.lease_id

    def _note_new_grant(self, grant: KVGrant) -> None:
        """Blocks that are said to be held are not looked at before they are adopted; the others hold nothing now."""
        assert self.blocks._users.keys() >= set(grant.block_ids)
        wipe(self.memory, grant.block_ids[grant.held_blocks :], b"\xcc")
        self._stage.log["found by decode"] += grant.held_blocks

    def _adopt(self, sequence: Sequence, peer: int) -> None:
        key = sequence.key
        attempt, at = self._aborted.get(key.request_id, (-1, 0.0))
        assert attempt < key.attempt or self.now - at > LEASE_S, "adopted although it was aborted"
        assert sequence.num_computed_tokens == sequence.num_prompt_tokens
        assert sequence.token_ids == [*new_sequence(key, sequence.num_prompt_tokens).token_ids, key.attempt]
        for layer in range(LAYOUT.num_layers):
            for index, block_id in enumerate(sequence.block_table):
                expected = true_kv(key, layer, index, sequence.num_prompt_tokens)
                assert self.memory.get((layer, block_id)) == expected, f"wrong KV for {key}"
        self._stage.fates.note_adopted(key, peer)
        self.running[key] = sequence

    # KV

    def write_remotely(self, piece: SendPiece, payload: bytes) -> None:
        """A sender's own write into this memory: the ledger must still keep the blocks for its lease."""
        for block_id in piece.target_block_ids:
            assert self._newest_grant[block_id] == piece.header.lease_id, "a remote write into another lease"
            assert block_id in self.blocks._users.keys() | self.blocks._revoked, "a remote write into a free block"
        self._write(piece.header, piece.target_block_ids, payload)

    def _write(self, header: PieceHeader, block_ids: tuple[int, ...], payload: bytes) -> None:
        for index, place in enumerate(product(header.layers, block_ids)):
            start = index * LAYOUT.block_bytes
            self.memory[place] = payload[start : start + LAYOUT.block_bytes]

    def _land(self, flight: Flight) -> None:
        try:
            header = unpack(flight.frame[:HEADER_BYTES])
        except WireError:
            self._stage.log["malformed"] += 1
            return
        place = self.receiver.accept(flight.source, header)
        if place is None:
            return
        self._check_place(flight.source, header, place.block_ids)
        payload, one_sided = flight.frame[HEADER_BYTES:], self.grants[header.lease_id][0].one_sided
        if one_sided:  # the sender has written it; only the header came
            payload = b"".join(self.memory[each] for each in product(header.layers, place.block_ids))
        if not is_intact(header, payload):
            self._stage.log["damaged pieces"] += 1
            self.do(self.receiver.corrupt(header, self.now))
            return
        if not one_sided:
            self._write(header, place.block_ids, payload)
        self.do(self.receiver.landed(header, self.now))

    def _check_place(self, source: int, header: PieceHeader, block_ids: tuple[int, ...]) -> None:
        grant, owner = self.grants[header.lease_id]
        assert owner == source, "a piece of another sender was accepted"
        assert block_ids == grant.block_ids[header.first_block : header.first_block + header.num_blocks]
        assert all(self._newest_grant[block_id] == header.lease_id for block_id in block_ids)
        assert self.blocks._users.keys() >= set(block_ids), "a piece for blocks that are not leased was accepted"
        running = {block_id for sequence in self.running.values() for block_id in sequence.block_table}
        assert running.isdisjoint(block_ids), "a piece for a running sequence was accepted"

    # what always holds

    def check(self) -> None:
        """No block is lost, and the bounds that the design names."""
        ledger, receiver = self.blocks.ledger, self.receiver
        assert ledger.conserved
        tables = [sequence.block_table for sequence in self.running.values()]
        leased = {block for table in [*tables, *(lease.block_ids for lease in receiver._leases)] for block in table}
        assert ledger.leased == len(leased)
        assert self._stage.one_sided or ledger.revoked == 0
        assert receiver._leases.num_blocks <= 0.3 * NUM_BLOCKS or receiver.num_leases == 1
        assert receiver.num_waiting <= 4

    def check_idle(self) -> None:
        """Nothing is left, and nothing is waited for."""
        assert self.blocks.num_free == NUM_BLOCKS, self.blocks.ledger
        assert (self.receiver.num_waiting, self.receiver.num_leases) == (0, 0)
        assert self.receiver.next_deadline() is None
