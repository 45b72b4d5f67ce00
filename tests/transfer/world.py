"""A small world around the real state machines: two prefill and two decode workers, a gateway, and a bad network.

It has a virtual clock that runs at another speed in each process. Whatever happens, it checks what must always hold:
no block is lost; a piece lands only in blocks under the live lease it names; a sequence is adopted only with exactly
the bytes that its sender computed, and once; an attempt is not both failed and adopted. Both ends have prefix caches,
and two of three requests begin alike: every block, found or sent, must hold what its prefix and its salt say.
"""

from collections import Counter

from kvrelay.transfer.protocol.actions import SendPiece
from kvrelay.types import RequestKey
from tests.transfer.decode_life import Decode
from tests.transfer.network import Flight, Network
from tests.transfer.nouns import NUM_BLOCKS
from tests.transfer.prefill_life import Prefill
from tests.transfer.stage import Stage


class World:
    """All processes and the network between them. The gateway is the world itself.

    In a `one_sided` world most senders write into the receivers' memory by themselves; those born later may not.
    """

    def __init__(self, *, one_sided: bool, network: Network | None = None) -> None:
        self.stage = Stage(Network() if network is None else network, one_sided=one_sided)
        self.fates = self.stage.fates
        self.log = self.stage.log
        self.network = self.stage.network
        self._next_request = 0
        self.prefills = [self._new_prefill(f"p{i}") for i in range(2)]
        self.decodes = [Decode(f"d{i}", self.stage) for i in range(2)]

    @property
    def now(self) -> float:
        """Seconds, by nobody's clock."""
        return self.stage.now

    @property
    def open(self) -> set[str]:
        """Requests that the gateway has not ended."""
        return self.fates.open

    @property
    def adopted(self) -> Counter[RequestKey]:
        """How often each attempt was."""
        return self.fates.adopted

    # processes

    @property
    def processes(self) -> list[Prefill | Decode]:
        """Those that live now."""
        return [*self.prefills, *self.decodes]

    def _new_prefill(self, name: str) -> Prefill:
        return Prefill(name, self.stage, self._write_remotely)

    def _write_remotely(self, piece: SendPiece, payload: bytes) -> None:
        for process in self.decodes:  # if it died, its memory died with it
            if process.incarnation == piece.peer.incarnation:
                process.write_remotely(piece, payload)

    def restart_prefill(self, index: int) -> None:
        """A prefill worker dies and another starts in its place; the decode workers notice."""
        self.network.is_gentle = False
        old, self.prefills[index] = self.prefills[index], self._new_prefill(self.prefills[index].name)
        for worker in self.decodes:
            is_writer = self.stage.is_writer(old.incarnation)
            notice = worker.receiver.on_peer_exited if is_writer else worker.receiver.on_peer_lost
            worker.do(notice(old.incarnation, worker.now))
        for key in [key for key, owner in self.fates.prefill_of.items() if owner == old.incarnation]:
            if key.request_id in self.open and not self.adopted[key]:
                self.abort(key.request_id)

    def restart_decode(self, index: int, *, noticed: bool) -> None:
        """A decode worker dies and another starts in its place; without notice the new one has to say so."""
        self.network.is_gentle = False
        old, self.decodes[index] = self.decodes[index], Decode(self.decodes[index].name, self.stage)
        for sequence in old.running.values():
            self.abort(sequence.key.request_id)
        if noticed:
            for prefill in self.prefills:
                prefill.do(prefill.sender.on_peer_lost(old.incarnation, prefill.now))

    def break_connection(self, prefill_index: int, decode_index: int, *, sender_notices: bool) -> None:
        """Only the connection breaks, and both live on."""
        self.network.is_gentle = False
        prefill, worker = self.prefills[prefill_index], self.decodes[decode_index]
        if sender_notices:
            prefill.do(prefill.sender.on_peer_lost(worker.incarnation, prefill.now))
        else:
            worker.do(worker.receiver.on_peer_lost(prefill.incarnation, worker.now))

    # the gateway

    def request(self, prefill_index: int, num_tokens: int, first_choice: int) -> str | None:
        """A new request, or None if the prefill worker has no room for its prompt."""
        self._next_request += 1
        request_id = f"{('', 'shared.', 'shared.', 'salted.')[self._next_request % 4]}r{self._next_request}"
        return request_id if self._try(request_id, 1, prefill_index, num_tokens, first_choice) else None

    def retry(self, request_id: str, prefill_index: int, num_tokens: int, first_choice: int) -> None:
        """The gateway gives up on an attempt and makes another."""
        attempt = self.fates.attempt_of[request_id]
        self._say_abort(RequestKey(request_id, attempt))
        if not self._try(request_id, attempt + 1, prefill_index, num_tokens, first_choice):
            self.fates.end(request_id, "no room")

    def _try(self, request_id: str, attempt: int, prefill_index: int, num_tokens: int, first_choice: int) -> bool:
        candidates = (self.decodes[first_choice].peer, self.decodes[1 - first_choice].peer)
        return self.prefills[prefill_index].begin(RequestKey(request_id, attempt), num_tokens, candidates)

    def abort(self, request_id: str) -> None:
        """The gateway ends a request; its Aborts go over the same bad network."""
        self.fates.end(request_id, "aborted")
        self._say_abort(RequestKey(request_id, self.fates.attempt_of[request_id]))

    def _say_abort(self, key: RequestKey) -> None:
        self.stage.say_abort(key, [process.name for process in self.processes])

    # workers

    def compute(self, prefill_index: int) -> None:
        """The oldest unfinished prompt of a prefill worker gets one more layer of one more chunk."""
        self.prefills[prefill_index].compute()

    def push(self, prefill_index: int, max_bytes: int) -> None:
        """A prefill worker's transport has room for some payload."""
        self.prefills[prefill_index].push(max_bytes)

    def grant(self, decode_index: int, max_blocks: int = NUM_BLOCKS, max_sequences: int = 8) -> None:
        """A decode worker's scheduler says how much room there is."""
        self.decodes[decode_index].grant(max_blocks, max_sequences)

    def finish(self, decode_index: int) -> None:
        """A decode worker's oldest running sequence ends."""
        self.decodes[decode_index].finish()

    # the network

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Whatever is at `index` arrives; with `keep` it will arrive again."""
        self._arrive(self.network[index] if keep else self.network.pop(index))

    def _arrive(self, flight: Flight) -> None:
        if self.now - flight.sent_at > 0.5:
            self.network.is_gentle = False
        for process in self.processes:
            if flight.to in (process.name, process.incarnation):
                process.arrive(flight)
                return

    # time

    def wait(self, seconds: float) -> None:
        """Time passes and every process looks at its clock."""
        if seconds > 0.5 and self.network:
            self.network.is_gentle = False
        self.stage.now += seconds
        for process in self.processes:
            process.tick()

    def work(self) -> None:
        """Everybody does what there is to do, and what is due arrives, in order."""
        for index in range(2):
            self.compute(index)
            self.push(index, 64)
            self.grant(index)
        self.arrive()

    def arrive(self) -> None:
        """What is due arrives, in order."""
        for flight in self.network.take_due(self.now):
            self._arrive(flight)

    # what always holds

    def check(self) -> None:
        """Conservation, and the bounds that the design names."""
        for process in self.processes:
            process.check()

    def settle(self) -> None:
        """The network behaves, time passes, everything finishes; then nothing may be left anywhere."""
        self._pass_time(200)
        still_open = set(self.open)
        for request_id in still_open:
            self.fates.end(request_id, "gateway's deadline")
        self._pass_time(100)
        self.check()
        assert not self.network
        assert not (self.network.is_gentle and still_open), f"{still_open} hang although nothing went wrong"
        assert all(count == 1 for count in self.fates.endings.values())
        assert set(self.fates.endings) == set(self.fates.attempt_of)
        for process in self.processes:
            process.check_idle()

    def _pass_time(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.work()
            self.wait(0.4)
            for index in range(2):
                self.finish(index)
