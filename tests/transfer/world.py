"""A small world around the real state machines: two prefill and two decode workers, a gateway, and a bad network.

It has a virtual clock that runs at another speed in each process. Whatever happens, it checks what must always hold:
no block is lost; a piece lands only in blocks under the live lease it names; a sequence is adopted only with exactly
the bytes that its sender computed, and once; an attempt is not both failed and adopted. Both ends have prefix caches,
and two of three requests begin alike: every block, found or sent, must hold what its prefix and its salt say.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrelay.blocks import BlockManager
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
    decode,
    encode,
)
from kvrelay.prefixes import Prefixes
from kvrelay.transfer.protocol.actions import (
    Action,
    Adopt,
    Dropped,
    DropSequence,
    Failed,
    FirstTokenDue,
    HandedOver,
    Send,
    SendPiece,
)
from kvrelay.transfer.protocol.piece import HEADER_BYTES, PieceHeader, is_intact, pack, seal, unpack
from kvrelay.types import RequestKey, Sequence
from tests.transfer.nouns import (
    FINGERPRINT,
    GATEWAY,
    LAYOUT,
    LEASE_S,
    NUM_BLOCKS,
    new_peer,
    new_receiver,
    new_sender,
    new_sequence,
    true_kv,
)

Memory = dict[tuple[int, int], bytes]  # (layer, block id) -> one block of one layer


@dataclass
class Flight:
    """Something on the network. `to` is an endpoint's name, or the incarnation of a process that must be there."""

    source: int
    to: str | int
    frame: bytes
    is_piece: bool
    sent_at: float


@dataclass
class Job:
    """A prompt in a prefill worker: `steps` of (layer, tokens) are left to compute; some tokens were there before."""

    sequence: Sequence
    steps: list[tuple[int, int]]


@dataclass
class Prefill:
    """One life of a prefill worker."""

    name: str
    incarnation: int
    rate: float
    jobs: dict[RequestKey, Job] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    committed: set[RequestKey] = field(default_factory=set)
    closed_leases: set[LeaseId] = field(default_factory=set)
    released_leases: set[LeaseId] = field(default_factory=set)
    num_asked: Counter[LeaseId] = field(default_factory=Counter)  # runs to send again
    mayfly: bool = False  # the next finished prompt ends at its first token

    def __post_init__(self) -> None:
        self.sender = new_sender(self.incarnation, max_piece_bytes=32)
        self.blocks = BlockManager(NUM_BLOCKS, LAYOUT.block_size)
        self.prefixes = Prefixes(self.blocks, FINGERPRINT)


@dataclass
class Decode:
    """One life of a decode worker. `newest_grant` is who was last given each block."""

    name: str
    incarnation: int
    rate: float
    memory: Memory = field(default_factory=dict)
    running: dict[RequestKey, Sequence] = field(default_factory=dict)
    grants: dict[LeaseId, tuple[KVGrant, int]] = field(default_factory=dict)
    newest_grant: dict[int, LeaseId] = field(default_factory=dict)
    aborted: dict[str, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, LAYOUT.block_size)
        prefixes = Prefixes(self.blocks, FINGERPRINT)
        self.receiver = new_receiver(self.incarnation, self.blocks, prefixes=prefixes)

    @property
    def peer(self) -> Peer:
        return new_peer(self.incarnation, self.name)


class World:
    """All processes and the network between them. The gateway is the world itself.

    In a `one_sided` world most senders write into the receivers' memory by themselves; those born later may not.
    """

    def __init__(self, *, one_sided: bool) -> None:
        self.one_sided = one_sided
        self.now = 100.0
        self.network: list[Flight] = []
        self.log: Counter[str] = Counter()
        self.attempt_of: dict[str, int] = {}
        self.prefill_of: dict[RequestKey, int] = {}
        self.open: set[str] = set()  # requests that the gateway has not ended
        self.endings: Counter[str] = Counter()
        self.failed: set[RequestKey] = set()
        self.failed_by_digest: set[RequestKey] = set()
        self.adopted: Counter[RequestKey] = Counter()
        self.is_gentle = True  # nothing lost, nobody died, nothing late: then no request waits for the gateway's clock
        self._next_incarnation = 1000
        self._next_request = 0
        self.prefills = [self._new_prefill(f"p{i}") for i in range(2)]
        self.decodes = [self._new_decode(f"d{i}") for i in range(2)]

    # processes

    @property
    def processes(self) -> list[Prefill | Decode]:
        """Those that live now."""
        return [*self.prefills, *self.decodes]

    def _new_incarnation(self) -> int:
        self._next_incarnation += 1
        return self._next_incarnation

    def _new_prefill(self, name: str) -> Prefill:
        return Prefill(name, self._new_incarnation(), rate=0.97 if name == "p0" else 1.02)

    def _new_decode(self, name: str) -> Decode:
        return Decode(name, self._new_incarnation(), rate=1.03 if name == "d0" else 0.98)

    def _is_writer(self, incarnation: int) -> bool:
        return self.one_sided and incarnation % 5 != 0

    def clock(self, process: Prefill | Decode) -> float:
        """The process's own monotonic clock."""
        return self.now * process.rate

    def restart_prefill(self, index: int) -> None:
        """A prefill worker dies and another starts in its place; the decode workers notice."""
        self.is_gentle = False
        old, self.prefills[index] = self.prefills[index], self._new_prefill(self.prefills[index].name)
        for decode_worker in self.decodes:
            receiver, now = decode_worker.receiver, self.clock(decode_worker)
            notice = receiver.on_peer_exited if self._is_writer(old.incarnation) else receiver.on_peer_lost
            self.do_decode(decode_worker, notice(old.incarnation, now))
        for key in [key for key, owner in self.prefill_of.items() if owner == old.incarnation]:
            if key.request_id in self.open and not self.adopted[key]:
                self.abort(key.request_id)

    def restart_decode(self, index: int, *, noticed: bool) -> None:
        """A decode worker dies and another starts in its place; without notice the new one has to say so."""
        self.is_gentle = False
        old, self.decodes[index] = self.decodes[index], self._new_decode(self.decodes[index].name)
        for sequence in old.running.values():
            self.abort(sequence.key.request_id)
        if noticed:
            for prefill in self.prefills:
                self.do_prefill(prefill, prefill.sender.on_peer_lost(old.incarnation, self.clock(prefill)))

    def break_connection(self, prefill_index: int, decode_index: int, *, sender_notices: bool) -> None:
        """Only the connection breaks, and both live on."""
        self.is_gentle = False
        prefill, decode_worker = self.prefills[prefill_index], self.decodes[decode_index]
        if sender_notices:
            actions = prefill.sender.on_peer_lost(decode_worker.incarnation, self.clock(prefill))
            self.do_prefill(prefill, actions)
        else:
            now = self.clock(decode_worker)
            self.do_decode(decode_worker, decode_worker.receiver.on_peer_lost(prefill.incarnation, now))

    # the gateway

    def request(self, prefill_index: int, num_tokens: int, first_choice: int) -> str | None:
        """A new request, or None if the prefill worker has no room for its prompt."""
        self._next_request += 1
        request_id = f"{('', 'shared.', 'shared.', 'salted.')[self._next_request % 4]}r{self._next_request}"
        return request_id if self._try(request_id, 1, prefill_index, num_tokens, first_choice) else None

    def retry(self, request_id: str, prefill_index: int, num_tokens: int, first_choice: int) -> None:
        """The gateway gives up on an attempt and makes another."""
        attempt = self.attempt_of[request_id]
        self._send_aborts(RequestKey(request_id, attempt))
        if not self._try(request_id, attempt + 1, prefill_index, num_tokens, first_choice):
            self.end(request_id, "no room")

    def _try(self, request_id: str, attempt: int, prefill_index: int, num_tokens: int, first_choice: int) -> bool:
        prefill = self.prefills[prefill_index]
        key = RequestKey(request_id, attempt)
        sequence = new_sequence(key, num_tokens)
        if LAYOUT.num_blocks(num_tokens) - prefill.prefixes.find(sequence).num_in_use > prefill.blocks.num_free:
            return False
        self._start(prefill, sequence)
        middle = (sequence.num_cached_tokens + num_tokens) // 2
        steps = [(layer, end) for end in (middle, num_tokens) for layer in range(LAYOUT.num_layers)]
        prefill.jobs[key] = Job(sequence, steps)
        self.attempt_of[request_id] = attempt
        self.prefill_of[key] = prefill.incarnation
        self.open.add(request_id)
        candidates = (self.decodes[first_choice].peer, self.decodes[1 - first_choice].peer)
        self.do_prefill(prefill, prefill.sender.offer(sequence, candidates, 1, self.clock(prefill)))
        prefill.sender.found(key, sequence.num_cached_tokens)
        return True

    def _start(self, prefill: Prefill, sequence: Sequence) -> None:
        """What a prefill scheduler does: blocks that are there already, and others that hold nothing yet."""
        found = prefill.prefixes.claim(sequence)
        fresh = prefill.blocks.allocate(LAYOUT.num_blocks(sequence.num_prompt_tokens) - len(found))
        sequence.block_table = found + fresh
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(found) * LAYOUT.block_size
        _wipe(prefill.memory, fresh, b"\xee")
        self.log["found by prefill"] += len(found)

    def abort(self, request_id: str) -> None:
        """The gateway ends a request; its Aborts go over the same bad network."""
        self.end(request_id, "aborted")
        self._send_aborts(RequestKey(request_id, self.attempt_of[request_id]))

    def _send_aborts(self, key: RequestKey) -> None:
        for process in self.processes:
            message = Abort(source=GATEWAY, target=0, request_id=key.request_id, attempt=key.attempt)
            self.network.append(Flight(GATEWAY, process.name, encode(message), False, self.now))

    def end(self, request_id: str, why: str) -> None:
        """A request ends once; what comes later is ignored."""
        if request_id in self.open:
            self.open.remove(request_id)
            self.endings[request_id] += 1
            self.log[f"ended: {why}"] += 1

    def _on_failed(self, failed: Failed) -> None:
        assert failed.gateway == GATEWAY
        assert not self.adopted[failed.key] or failed.key in self.failed_by_digest, f"{failed} after it was adopted"
        self.failed.add(failed.key)
        if self.attempt_of[failed.key.request_id] == failed.key.attempt:
            self.end(failed.key.request_id, failed.code)

    # prefill workers

    def compute(self, prefill_index: int) -> None:
        """The oldest unfinished prompt of a prefill worker gets one more layer of one more chunk."""
        prefill = self.prefills[prefill_index]
        job = next((job for job in prefill.jobs.values() if job.steps), None)
        if job is None:
            return
        key = job.sequence.key
        layer, num_tokens = job.steps.pop(0)
        self._write_layer(prefill, job.sequence, layer, num_tokens)
        prefill.sender.advance(key, layer, num_tokens)
        if layer == LAYOUT.num_layers - 1:
            num_new = num_tokens - job.sequence.num_computed_tokens
            job.sequence.num_computed_tokens = num_tokens
            prefill.prefixes.publish(job.sequence, num_new)
        if job.steps:
            return
        if prefill.mayfly:
            prefill.mayfly = False
            self.end(key.request_id, "first token was the last")
            self.do_prefill(prefill, prefill.sender.abort(key, self.clock(prefill)))
            self._free(prefill, key)
        else:
            self.do_prefill(prefill, prefill.sender.commit(key, (key.attempt,), self.clock(prefill)))

    def _write_layer(self, prefill: Prefill, sequence: Sequence, layer: int, num_tokens: int) -> None:
        """The forward writes the blocks from the first uncomputed token to the chunk's end."""
        first = sequence.num_computed_tokens // LAYOUT.block_size
        for block in range(first, LAYOUT.num_blocks(num_tokens)):
            full = (block + 1) * LAYOUT.block_size <= num_tokens or num_tokens == sequence.num_prompt_tokens
            content = true_kv(sequence.key, layer, block, sequence.num_prompt_tokens)
            prefill.memory[layer, sequence.block_table[block]] = content if full else b"\xdd" * LAYOUT.block_bytes

    def push(self, prefill_index: int, max_bytes: int) -> None:
        """A prefill worker's transport has room for some payload."""
        prefill = self.prefills[prefill_index]
        self.do_prefill(prefill, prefill.sender.next_pieces(max_bytes, self.clock(prefill)))

    def do_prefill(self, prefill: Prefill, actions: list[Action]) -> None:
        """What a prefill worker does with its sender's actions."""
        for action in actions:
            match action:
                case Send(peer, message):
                    assert isinstance(peer, Peer), "a sender knows where its receivers are"
                    self._note_sent(prefill, message)
                    self._put(prefill.incarnation, peer.name, message)
                case SendPiece():
                    self._send_piece(prefill, action)
                case FirstTokenDue(key):
                    assert not prefill.jobs[key].steps
                    self.log["first tokens"] += 1
                case HandedOver(key):
                    self.log["handed over"] += 1
                    self._free(prefill, key)
                case Dropped(key):
                    self._free(prefill, key)
                case Failed(key, _, _, _):
                    assert key not in prefill.committed, f"{action} after its commit"
                    self._free(prefill, key)
                    self._on_failed(action)
                case _:
                    raise AssertionError(f"{action} is not a sender's")

    def _note_sent(self, prefill: Prefill, message: AnyMessage) -> None:
        match message:
            case KVCommit():
                prefill.committed.add(message.key)
                if message.num_repaired == prefill.num_asked[message.lease_id]:
                    prefill.closed_leases.add(message.lease_id)
            case KVReleased():
                prefill.released_leases.add(message.lease_id)
            case _:
                assert isinstance(message, KVOffer | Abort)

    def _note_asked_again(self, prefill: Prefill, repair: KVRepair) -> None:
        self.log["asked again"] += 1
        if len(repair.runs) > prefill.num_asked[repair.lease_id]:
            prefill.num_asked[repair.lease_id] = len(repair.runs)
            prefill.closed_leases.discard(repair.lease_id)

    def _send_piece(self, prefill: Prefill, piece: SendPiece) -> None:
        header = piece.header
        assert header.lease_id not in prefill.closed_leases, "a write after the lease was committed"
        assert header.lease_id not in prefill.released_leases, "a write after the lease was released"
        assert header.digest == 0
        assert len(piece.block_ids) == len(piece.target_block_ids) == header.num_blocks
        payload = b"".join(prefill.memory[header.layer, block_id] for block_id in piece.block_ids)
        frame = pack(seal(header, payload)) + payload
        if piece.one_sided:
            self._write_remotely(piece, payload)
        self.network.append(Flight(prefill.incarnation, piece.peer.name, frame, True, self.now))

    def _write_remotely(self, piece: SendPiece, payload: bytes) -> None:
        """The sender's own write into the receiver's memory: the ledger must still keep the blocks for this lease."""
        target = next((item for item in self.decodes if item.incarnation == piece.peer.incarnation), None)
        if target is None:
            return  # it died, and its memory with it
        for block_id in piece.target_block_ids:
            assert target.newest_grant[block_id] == piece.header.lease_id, "a remote write into another lease"
            assert block_id in target.blocks._users.keys() | target.blocks._revoked, "a remote write into a free block"
        self._write(target, piece.header, piece.target_block_ids, payload)

    def _free(self, prefill: Prefill, key: RequestKey) -> None:
        """Frees a prompt's blocks; what is read from them afterwards shows in the receiver's memory."""
        job = prefill.jobs.pop(key, None)
        if job is not None:
            prefill.blocks.release(job.sequence.block_table)
            _wipe(prefill.memory, set(job.sequence.block_table) & set(prefill.blocks._free), b"\xff")

    # decode workers

    def grant(self, decode_index: int, max_blocks: int = NUM_BLOCKS, max_sequences: int = 8) -> None:
        """The scheduler says how much room there is."""
        worker = self.decodes[decode_index]
        self.do_decode(worker, worker.receiver.grant(max_blocks, max_sequences, self.clock(worker)))

    def finish(self, decode_index: int) -> None:
        """The oldest running sequence ends."""
        worker = self.decodes[decode_index]
        if worker.running:
            key = next(iter(worker.running))
            worker.blocks.release(worker.running.pop(key).block_table)
            if self.attempt_of[key.request_id] == key.attempt:
                self.end(key.request_id, "finished")

    def do_decode(self, worker: Decode, actions: list[Action]) -> None:
        """What a decode worker does with its receiver's actions."""
        for action in actions:
            match action:
                case Send(peer, message):
                    assert isinstance(peer, int), "a receiver answers whom it heard"
                    self._note_answered(worker, action)
                    self._put(worker.incarnation, peer, message)
                case Adopt(sequence, peer):
                    self._adopt(worker, sequence, peer)
                case DropSequence(key):
                    for running in [known for known in worker.running if key.covers(known)]:
                        worker.blocks.release(worker.running.pop(running).block_table)
                        self.end(running.request_id, "dropped")
                case Failed(key, _, _, message):
                    if "damaged" in message:
                        self.failed_by_digest.add(key)
                    self._on_failed(action)
                case _:
                    raise AssertionError(f"{action} is not a receiver's")

    def _note_answered(self, worker: Decode, action: Send) -> None:
        match action.message:
            case KVGrant() as grant:
                assert isinstance(action.peer, int)
                if grant.lease_id not in worker.grants:
                    self._note_new_grant(worker, grant)
                worker.grants.setdefault(grant.lease_id, (grant, action.peer))
                assert worker.grants[grant.lease_id] == (grant, action.peer), "the same lease, two grants"
                for block_id in grant.block_ids[grant.held_blocks :]:
                    newest = worker.newest_grant.get(block_id, grant.lease_id)
                    assert newest.counter <= grant.lease_id.counter, "an old lease's blocks are given to another"
                    worker.newest_grant[block_id] = grant.lease_id
            case message:
                assert isinstance(message, KVRefusal | KVRepair | KVAck | KVReject)

    def _note_new_grant(self, worker: Decode, grant: KVGrant) -> None:
        """Blocks that are said to be held are not looked at before they are adopted; the others hold nothing now."""
        assert worker.blocks._users.keys() >= set(grant.block_ids)
        _wipe(worker.memory, grant.block_ids[grant.held_blocks :], b"\xcc")
        self.log["found by decode"] += grant.held_blocks

    def _adopt(self, worker: Decode, sequence: Sequence, peer: int) -> None:
        key = sequence.key
        assert self.prefill_of[key] == peer
        assert key not in self.failed - self.failed_by_digest, f"{key} was adopted after it failed"
        attempt, at = worker.aborted.get(key.request_id, (-1, 0.0))
        assert attempt < key.attempt or self.clock(worker) - at > LEASE_S, "adopted although it was aborted"
        assert sequence.num_computed_tokens == sequence.num_prompt_tokens
        assert sequence.token_ids == [*new_sequence(key, sequence.num_prompt_tokens).token_ids, key.attempt]
        for layer in range(LAYOUT.num_layers):
            for index, block_id in enumerate(sequence.block_table):
                expected = true_kv(key, layer, index, sequence.num_prompt_tokens)
                assert worker.memory.get((layer, block_id)) == expected, f"wrong KV for {key}"
        self.adopted[key] += 1
        assert self.adopted[key] == 1, f"{key} was adopted twice"
        self.log["adopted"] += 1
        worker.running[key] = sequence

    def _write(self, worker: Decode, header: PieceHeader, block_ids: tuple[int, ...], payload: bytes) -> None:
        for index, block_id in enumerate(block_ids):
            start = index * LAYOUT.block_bytes
            worker.memory[header.layer, block_id] = payload[start : start + LAYOUT.block_bytes]

    # the network

    def _put(self, source: int, to: str | int, message: AnyMessage) -> None:
        self.network.append(Flight(source, to, encode(message), False, self.now))

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Whatever is at `index` arrives; with `keep` it will arrive again."""
        flight = self.network[index] if keep else self.network.pop(index)
        if self.now - flight.sent_at > 0.5:
            self.is_gentle = False
        for process in self.processes:
            if flight.to in (process.name, process.incarnation):
                self._arrive(process, flight)
                return

    def _arrive(self, process: Prefill | Decode, flight: Flight) -> None:
        if isinstance(process, Prefill):
            self._arrive_at_prefill(process, flight)
        elif flight.is_piece:
            self._land(process, flight)
        else:
            self._arrive_at_decode(process, flight)

    def _arrive_at_prefill(self, prefill: Prefill, flight: Flight) -> None:
        match decode(flight.frame):
            case Abort() as abort:
                self.do_prefill(prefill, prefill.sender.abort(abort.key, self.clock(prefill)))
                for key in [key for key in prefill.jobs if abort.key.covers(key)]:
                    self._free(prefill, key)
            case KVGrant() | KVRefusal() | KVRepair() | KVAck() | KVReject() as message:
                if isinstance(message, KVRepair):
                    self._note_asked_again(prefill, message)
                actions = prefill.sender.on_message(flight.source, message, self.clock(prefill))
                self.do_prefill(prefill, actions)
            case message:
                raise AssertionError(f"{message} came to a sender")

    def _arrive_at_decode(self, worker: Decode, flight: Flight) -> None:
        now = self.clock(worker)
        match decode(flight.frame):
            case Abort() as abort if flight.source == GATEWAY:
                self._note_aborted(worker, abort)
                self.do_decode(worker, worker.receiver.abort(abort.key, now))
            case KVOffer() | KVCommit() | KVReleased() | Abort() as message:
                if isinstance(message, KVOffer) and self._is_writer(flight.source):
                    worker.receiver.on_memory_shared(flight.source)
                if isinstance(message, Abort) and message.target == worker.incarnation:
                    self._note_aborted(worker, message)
                self.do_decode(worker, worker.receiver.on_message(flight.source, message, now))
            case message:
                raise AssertionError(f"{message} came to a receiver")

    def _note_aborted(self, worker: Decode, abort: Abort) -> None:
        known = worker.aborted.get(abort.request_id, (-1, 0.0))
        worker.aborted[abort.request_id] = max(known, (abort.attempt, self.clock(worker)))

    def _land(self, worker: Decode, flight: Flight) -> None:
        try:
            header = unpack(flight.frame[:HEADER_BYTES])
        except WireError:
            return
        place = worker.receiver.accept(flight.source, header)
        if place is None:
            return
        block_ids = place.block_ids
        self._check_place(worker, flight.source, header, block_ids)
        payload = flight.frame[HEADER_BYTES:]
        if not is_intact(header, payload):
            self.log["damaged pieces"] += 1
            self.do_decode(worker, worker.receiver.corrupt(header, self.clock(worker)))
            return
        if not worker.grants[header.lease_id][0].one_sided:
            self._write(worker, header, block_ids, payload)
        self.do_decode(worker, worker.receiver.landed(header, self.clock(worker)))

    def _check_place(self, worker: Decode, source: int, header: PieceHeader, block_ids: tuple[int, ...]) -> None:
        grant, owner = worker.grants[header.lease_id]
        assert owner == source, "a piece of another sender was accepted"
        assert block_ids == grant.block_ids[header.first_block : header.first_block + header.num_blocks]
        assert all(worker.newest_grant[block_id] == header.lease_id for block_id in block_ids)
        assert worker.blocks._users.keys() >= set(block_ids), "a piece for blocks that are not leased was accepted"
        running = {block_id for sequence in worker.running.values() for block_id in sequence.block_table}
        assert running.isdisjoint(block_ids), "a piece for a running sequence was accepted"

    def lose(self, index: int) -> None:
        """Something does not arrive."""
        self.is_gentle = False
        self.network.pop(index)

    def flip(self, index: int, bit: int) -> None:
        """One bit of a piece changes on its way."""
        pieces = [flight for flight in self.network if flight.is_piece]
        if pieces:
            self.is_gentle = False
            flight = pieces[index % len(pieces)]
            flipped = bytearray(flight.frame)
            flipped[bit // 8 % len(flipped)] ^= 1 << bit % 8
            flight.frame = bytes(flipped)

    # time

    def wait(self, seconds: float) -> None:
        """Time passes and every process looks at its clock."""
        if seconds > 0.5 and self.network:
            self.is_gentle = False
        self.now += seconds
        for prefill in self.prefills:
            self.do_prefill(prefill, prefill.sender.tick(self.clock(prefill)))
        for worker in self.decodes:
            self.do_decode(worker, worker.receiver.tick(self.clock(worker)))

    def work(self) -> None:
        """Everybody does what there is to do, in order, and the network behaves."""
        for index in range(2):
            self.compute(index)
            self.push(index, 64)
            self.grant(index)
        for _ in range(len(self.network)):
            self.deliver(0)

    # what always holds

    def check(self) -> None:
        """Conservation, and the bounds that the design names."""
        for prefill in self.prefills:
            ledger = prefill.blocks.ledger
            assert ledger.conserved
            assert ledger.leased == len(_all_of(job.sequence.block_table for job in prefill.jobs.values()))
            assert prefill.sender.num_handovers <= len(prefill.jobs)
        for worker in self.decodes:
            ledger, receiver = worker.blocks.ledger, worker.receiver
            assert ledger.conserved
            running = [sequence.block_table for sequence in worker.running.values()]
            assert ledger.leased == len(_all_of([*running, *(lease.block_ids for lease in receiver._leases)]))
            assert self.one_sided or ledger.revoked == 0
            assert receiver.num_uncommitted_blocks <= 0.3 * NUM_BLOCKS or receiver.num_leases == 1
            assert receiver.num_waiting <= 4

    def settle(self) -> None:
        """The network behaves, time passes, everything finishes; then nothing may be left anywhere."""
        for _ in range(200):
            self.work()
            self.wait(0.4)
            for index in range(2):
                self.finish(index)
        still_open = set(self.open)
        for request_id in still_open:
            self.end(request_id, "gateway's deadline")
        for _ in range(100):
            self.work()
            self.wait(0.4)
            self.finish(0)
            self.finish(1)
        self.check()
        assert not self.network
        assert not (self.is_gentle and still_open), f"{still_open} hang although nothing went wrong"
        assert all(count == 1 for count in self.endings.values())
        assert set(self.endings) == set(self.attempt_of)
        self._check_idle()

    def _check_idle(self) -> None:
        for prefill in self.prefills:
            assert prefill.blocks.num_free == NUM_BLOCKS, prefill.blocks.ledger
            assert not prefill.sender.has_pending
            assert prefill.sender.next_deadline() is None
        for worker in self.decodes:
            assert worker.blocks.num_free == NUM_BLOCKS, worker.blocks.ledger
            assert (worker.receiver.num_waiting, worker.receiver.num_leases) == (0, 0)
            assert worker.receiver.next_deadline() is None


def _wipe(memory: Memory, block_ids: Iterable[int], filler: bytes) -> None:
    for block_id in block_ids:
        memory.update({(layer, block_id): filler * LAYOUT.block_bytes for layer in range(LAYOUT.num_layers)})


def _all_of(tables: Iterable[Iterable[int]]) -> set[int]:
    return {block_id for table in tables for block_id in table}
