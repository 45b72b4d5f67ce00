"""One life of a prefill worker of a world, around a real sender."""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from kvrelay.blocks import BlockManager
from kvrelay.encoding import decode
from kvrelay.errors import WireError
from kvrelay.messages import (
    Abort,
    AnyMessage,
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
from kvrelay.transfer.protocol.actions import (
    Action,
    Dropped,
    Failed,
    FirstTokenDue,
    HandedOver,
    Send,
    SendPiece,
)
from kvrelay.transfer.protocol.piece import pack, seal
from kvrelay.types import RequestKey, Sequence
from tests.transfer.network import PIECE, Flight
from tests.transfer.nouns import FINGERPRINT, LAYOUT, NUM_BLOCKS, new_sender, new_sequence, true_kv
from tests.transfer.stage import Memory, Stage, wipe


@dataclass
class Job:
    """A prompt in a prefill worker: `steps` of (layer, tokens) are left to compute; some tokens were there before."""

    sequence: Sequence
    steps: list[tuple[int, int]]


class Shared(Protocol):
    """The memory of receivers, into which a sender may be allowed to write by itself."""

    def __call__(self, piece: SendPiece, payload: bytes) -> None:
        """Writes there."""
        ...


class Prefill:
    """Computes prompts, and does what its sender says."""

    def __init__(self, name: str, stage: Stage, shared: Shared) -> None:
        self.name = name
        self.incarnation = stage.new_incarnation()
        self.jobs: dict[RequestKey, Job] = {}
        self.memory: Memory = {}
        self.mayfly = False  # the next finished prompt ends at its first token
        self.sender = new_sender(self.incarnation, max_piece_bytes=32)
        self.blocks = BlockManager(NUM_BLOCKS, LAYOUT.block_size)
        self.prefixes = Prefixes(self.blocks, FINGERPRINT)
        self._stage = stage
        self._shared = shared
        self._rate = 0.97 if name == "p0" else 1.02
        self._committed: set[RequestKey] = set()
        self._closed_leases: set[LeaseId] = set()
        self._released_leases: set[LeaseId] = set()
        self._num_asked: Counter[LeaseId] = Counter()  # runs to send again

    @property
    def now(self) -> float:
        """Its own monotonic clock."""
        return self._stage.now * self._rate

    # what a scheduler does

    def begin(self, key: RequestKey, num_tokens: int, candidates: tuple[Peer, ...]) -> bool:
        """A new attempt; False if there is no room for its prompt."""
        sequence = new_sequence(key, num_tokens)
        if LAYOUT.num_blocks(num_tokens) - self.prefixes.find(sequence).num_in_use > self.blocks.num_free:
            return False
        self._claim(sequence)
        middle = (sequence.num_cached_tokens + num_tokens) // 2
        steps = [(layer, end) for end in (middle, num_tokens) for layer in range(LAYOUT.num_layers)]
        self.jobs[key] = Job(sequence, steps)
        self._stage.fates.begin(key, self.incarnation)
        self.do(self.sender.offer(sequence, candidates, 1, self.now))
        self.sender.found(key, sequence.num_cached_tokens)
        return True

    def _claim(self, sequence: Sequence) -> None:
        """Blocks that are there already, and others that hold nothing yet."""
        found = self.prefixes.claim(sequence)
        fresh = self.blocks.allocate(LAYOUT.num_blocks(sequence.num_prompt_tokens) - len(found))
        sequence.block_table = found + fresh
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(found) * LAYOUT.block_size
        wipe(self.memory, fresh, b"\xee")
        self._stage.log["found by prefill"] += len(found)

    def compute(self) -> None:
        """The oldest unfinished prompt gets one more layer of one more chunk."""
        job = next((job for job in self.jobs.values() if job.steps), None)
        if job is None:
            return
        layer, num_tokens = job.steps.pop(0)
        self._write_layer(job.sequence, layer, num_tokens)
        self.sender.advance(job.sequence.key, layer, num_tokens)
        if layer == LAYOUT.num_layers - 1:
            num_new = num_tokens - job.sequence.num_computed_tokens
            job.sequence.num_computed_tokens = num_tokens
            self.prefixes.publish(job.sequence, num_new)
        if not job.steps:
            self._finish(job.sequence.key)

    def _finish(self, key: RequestKey) -> None:
        if self.mayfly:
            self.mayfly = False
            self._stage.fates.end(key.request_id, "first token was the last")
            self.do(self.sender.abort(key, self.now))
            self._free(key)
        else:
            self.do(self.sender.commit(key, (key.attempt,), self.now))

    def _write_layer(self, sequence: Sequence, layer: int, num_tokens: int) -> None:
        """The forward writes the blocks from the first uncomputed token to the chunk's end."""
        first = sequence.num_computed_tokens // LAYOUT.block_size
        for block in range(first, LAYOUT.num_blocks(num_tokens)):
            full = (block + 1) * LAYOUT.block_size <= num_tokens or num_tokens == sequence.num_prompt_tokens
            content = true_kv(sequence.key, layer, block, sequence.num_prompt_tokens)
            self.memory[layer, sequence.block_table[block]] = content if full else b"\xdd" * LAYOUT.block_bytes

    def push(self, max_bytes: int) -> None:
        """The transport has room for some payload."""
        self.do(self.sender.next_pieces(max_bytes, self.now))

    def tick(self) -> None:
        """Looks at its clock."""
        self.do(self.sender.tick(self.now))

    # what a worker does

    def arrive(self, flight: Flight) -> None:
        """Something comes from the network."""
        try:
            message = decode(flight.frame)
        except WireError:
            self._stage.log["malformed"] += 1
            return
        match message:
            case Abort() as abort:
                self.do(self.sender.abort(abort.key, self.now))
                for key in [key for key in self.jobs if abort.key.covers(key)]:
                    self._free(key)
            case KVGrant() | KVRefusal() | KVRepair() | KVAck() | KVReject():
                if isinstance(message, KVRepair):
                    self._note_asked_again(message)
                self.do(self.sender.on_message(flight.source, message, self.now))
            case _:
                raise AssertionError(f"{message} came to a sender")

    def do(self, actions: list[Action]) -> None:
        """What its sender says."""
        for action in actions:
            match action:
                case Send(peer, message):
                    assert isinstance(peer, Peer), "a sender knows where its receivers are"
                    self._note_sent(message)
                    self._stage.network.say(self.incarnation, peer.name, message, self._stage.now)
                case SendPiece():
                    self._send_piece(action)
                case FirstTokenDue(key):
                    assert not self.jobs[key].steps
                    self._stage.log["first tokens"] += 1
                case HandedOver(key):
                    self._stage.log["handed over"] += 1
                    self._free(key)
                case Dropped(key):
                    self._free(key)
                case Failed(key, _, _, _):
                    assert key not in self._committed, f"{action} after its commit"
                    self._free(key)
                    self._stage.fates.note_failed(action)
                case _:
                    raise AssertionError(f"{action} is not a sender's")

    def _note_sent(self, message: AnyMessage) -> None:
        match message:
            case KVCommit():
                self._committed.add(message.key)
                if message.num_repaired == self._num_asked[message.lease_id]:
                    self._closed_leases.add(message.lease_id)
            case KVReleased():
                self._released_leases.add(message.lease_id)
            case _:
                assert isinstance(message, KVOffer | Abort)

    def _note_asked_again(self, repair: KVRepair) -> None:
        self._stage.log["asked again"] += 1
        if len(repair.runs) > self._num_asked[repair.lease_id]:
            self._num_asked[repair.lease_id] = len(repair.runs)
            self._closed_leases.discard(repair.lease_id)

    def _send_piece(self, piece: SendPiece) -> None:
        header = piece.header
        assert header.lease_id not in self._closed_leases, "a write after the lease was committed"
        assert header.lease_id not in self._released_leases, "a write after the lease was released"
        assert header.digest == 0
        assert len(piece.block_ids) == len(piece.target_block_ids) == header.num_blocks
        payload = b"".join(self.memory[each] for each in product(header.layers, piece.block_ids))
        frame = pack(seal(header, payload))
        if piece.one_sided:
            self._shared(piece, payload)
        else:
            frame += payload
        self._stage.network.put(Flight(self.incarnation, piece.peer.name, frame, PIECE, self._stage.now))

    def _free(self, key: RequestKey) -> None:
        """Frees a prompt's blocks; what is read from them afterwards shows in the receiver's memory."""
        job = self.jobs.pop(key, None)
        if job is not None:
            self.blocks.release(job.sequence.block_table)
            wipe(self.memory, set(job.sequence.block_table) & set(self.blocks._free), b"\xff")

    # what always holds

    def check(self) -> None:
        """No block is lost, and none is kept for a prompt that is over."""
        ledger = self.blocks.ledger
        assert ledger.conserved
        assert ledger.leased == len({block for job in self.jobs.values() for block in job.sequence.block_table})
        assert len(self.sender._handovers) <= len(self.jobs)

    def check_idle(self) -> None:
        """Nothing is left, and nothing is waited for."""
        assert self.blocks.num_free == NUM_BLOCKS, self.blocks.ledger
        assert not self.sender.has_pending
        assert self.sender.next_deadline() is None
