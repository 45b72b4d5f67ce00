"""The prefill worker: computes prompts and pushes their KV, layer by layer, to decode workers."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from kvrelay.blocks import BlockManager
from kvrelay.config import WorkerSettings
from kvrelay.errors import Draining, RequestError
from kvrelay.events import Event as RequestEvent
from kvrelay.mailbox import Event, FromGateway, FromPeer, Order, PeerLost, PieceArrived, SendPayload, ToPeer
from kvrelay.messages import (
    KVAck,
    KVGrant,
    KVRefusal,
    KVReject,
    KVRepair,
    Ledger,
    PairStatus,
    PrefillRequest,
    RequestEvents,
    WorkerLoad,
)
from kvrelay.model.runner import ModelRunner
from kvrelay.model.served import load_served
from kvrelay.outputs import OutputStore
from kvrelay.prefill.scheduler import PrefillScheduler
from kvrelay.prefixes import Prefixes
from kvrelay.process import WorkerProcess, new_incarnation
from kvrelay.transfer.data_plane import open_data_plane
from kvrelay.transfer.ports import MAX_TAKEN_BYTES, Outlet
from kvrelay.transfer.protocol.actions import Action, Dropped, Failed, FirstTokenDue, HandedOver, Send, SendPiece
from kvrelay.transfer.protocol.sender import KVSender
from kvrelay.types import Batch, FinishReason, Incarnation, RequestKey, Role, SampledToken, Sequence
from kvrelay.worker import Worker, WorkerContext


@dataclass(slots=True)
class Prompt:
    """A prompt that is here, and when its first chunk began and its last one ended, in seconds of our clock."""

    sequence: Sequence
    request: PrefillRequest
    begun_at: float = inf
    ended_at: float = inf


class PrefillWorker(Worker):
    """Runs prompts in chunks; after each layer its finished blocks leave and messages are looked at."""

    def __init__(
        self,
        context: WorkerContext,
        runner: ModelRunner,
        scheduler: PrefillScheduler,
        sender: KVSender,
        outlet: Outlet,
        blocks: BlockManager,
        lease_s: float,
    ) -> None:
        """Owns all of them; `blocks` are the scheduler's. No payload waits longer than `lease_s` seconds to be sent."""
        super().__init__(context)
        self._blocks = blocks
        self._runner = runner
        self._scheduler = scheduler
        self._sender = sender
        self._outlet = outlet
        self._lease_s = lease_s
        self._prompts: dict[RequestKey, Prompt] = {}

    # the loop

    def schedule(self) -> Batch:
        """The next chunks; prompts that run or come next are offered to a decode worker."""
        batch, now = self._scheduler.schedule(), self._clock()
        for sequence in self._scheduler.to_offer():
            request = self._prompts[sequence.key].request
            self._do(self._sender.offer(sequence, request.candidates, request.num_samples, now))
        for item in batch.scheduled:
            prompt = self._prompts[item.sequence.key]
            prompt.begun_at = min(prompt.begun_at, now)
            if 0 < item.sequence.num_cached_tokens == item.sequence.num_computed_tokens:  # its first chunk
                self._sender.found(item.sequence.key, item.sequence.num_cached_tokens)
        return batch

    def compute(self, batch: Batch) -> list[SampledToken | None]:
        """One forward pass, its KV leaving layer by layer."""
        layers = self._runner.run(batch)
        while True:
            try:
                layer = next(layers)
            except StopIteration as result:
                sampled: list[SampledToken | None] = result.value
                return sampled
            for item in batch.scheduled:
                end = item.sequence.num_computed_tokens + item.num_tokens
                self._sender.advance(item.sequence.key, layer, end)
            self.take_messages(0.0)

    def complete(self, batch: Batch, sampled: list[int | None]) -> None:
        """Prompts that are done: their KV goes to the end, or they end at their first token."""
        for sequence in self._scheduler.complete(batch, sampled):
            self._prompts[sequence.key].ended_at = self._clock()
            if self._finish_reason(sequence) is None:
                self._do(self._sender.commit(sequence.key, (sequence.token_ids[-1],), self._clock()))
            else:
                self._report_first(sequence)
                self._do(self._sender.abort(sequence.key, self._clock()))
                self._forget(sequence.key)

    # events

    def handle(self, event: Event) -> None:
        """Requests from gateways, answers from receivers of KV."""
        match event:
            case FromGateway(gateway, PrefillRequest() as request):
                self._begin(gateway, request)
            case FromPeer(peer, KVGrant() | KVRefusal() | KVRepair() | KVAck() | KVReject() as message):
                self._do(self._sender.on_message(peer, message, self._clock()))
            case PeerLost(peer):
                self._do(self._sender.on_peer_lost(peer, self._clock()))
            case _:
                self._counters["unexpected_message"] += 1

    def take_piece(self, piece: PieceArrived) -> int:
        """Nobody was offered room here, so nobody has a lease."""
        self._counters["unexpected_piece"] += 1
        return len(piece.header)

    def tick(self, now: float) -> None:
        """Deadlines, offers to repeat, and payload that can leave."""
        self._outputs.expire(now)
        self._do(self._sender.tick(now))
        if self._sender.has_pending and (room := self._mailbox.payload_room):
            self._do(self._sender.next_pieces(min(room, MAX_TAKEN_BYTES), now))

    def next_deadline(self) -> float | None:
        """The sender's; at once while there is something to send and room for it."""
        if self._sender.has_pending and self._mailbox.payload_room:
            return self._clock()
        return self._sender.next_deadline()

    def drain(self) -> None:
        """Requests that come later are refused; nothing else changes."""

    def abort(self, key: RequestKey) -> None:
        """Stops within one chunk and tells the receiver."""
        self._do(self._sender.abort(key, self._clock()))
        self._scheduler.abort(key)
        self._outputs.abort(key)
        for known in [known for known in self._prompts if key.covers(known)]:
            del self._prompts[known]

    def abort_all(self, gateway: Incarnation) -> None:
        """Drops what the gateway owned."""
        for key in [key for key, prompt in self._prompts.items() if prompt.sequence.gateway == gateway]:
            self.abort(key)

    def distrust(self, sequence: Sequence) -> None:
        """Nobody else is given its blocks from here on."""
        self._blocks.forget(sequence.block_table)

    def load(self) -> tuple[Ledger, WorkerLoad, Counter[str]]:
        """For the heartbeat."""
        return self._blocks.ledger, self._scheduler.load, self._sender.counters

    def pairs(self) -> tuple[PairStatus, ...]:
        """For the heartbeat."""
        return self._sender.pairs.status

    def is_idle(self) -> bool:
        """No prompt is here."""
        return not self._prompts

    # what follows

    def _begin(self, gateway: Incarnation, request: PrefillRequest) -> None:
        if request.key in self._prompts:
            self._counters["duplicate_request"] += 1
            return
        try:
            if self._draining:
                raise Draining("This prefill worker is draining and takes no new requests.")
            sequence = self.new_sequence(gateway, request)
            self._scheduler.add(sequence)
        except RequestError as error:
            self.fail(gateway, request.key, error.code, error.message)
        else:
            self._prompts[request.key] = Prompt(sequence, request)
            self._outputs.open(request.key, request.num_samples)

    def _do(self, actions: Iterable[Action]) -> None:
        self._mailbox.post(self._orders(actions))

    def _orders(self, actions: Iterable[Action]) -> Iterator[Order]:
        """What is to be said and sent; the rest is done on the way."""
        for action in actions:
            match action:
                case Send(peer, message):
                    yield ToPeer(peer, message)
                case SendPiece(peer):
                    yield SendPayload(peer, *self._outlet.take(action), self._clock() + self._lease_s)
                case FirstTokenDue(key):
                    self._report_first(self._prompts[key].sequence)
                case HandedOver(key) | Dropped(key):
                    self._leave(key)
                case Failed(key, gateway, code, message):
                    self._leave(key)
                    self.fail(gateway, key, code, message)

    def _report_first(self, sequence: Sequence) -> None:
        prompt, now = self._prompts[sequence.key], self._clock()
        ages_s = {RequestEvent.PREFILL_BEGIN: now - prompt.begun_at, RequestEvent.PREFILL_END: now - prompt.ended_at}
        self.tell(sequence.gateway, RequestEvents(**self.about(sequence.gateway, sequence.key), ages_s=ages_s))
        output = self.keep(sequence, 0, sequence.token_ids[-1], self._finish_reason(sequence))
        self.report([(sequence.gateway, output)])

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        config = self._runner.config
        return sequence.finish_reason(config.eos_token_ids, config.max_model_len)

    def _leave(self, key: RequestKey) -> None:
        """The attempt is somebody else's from here on, its first token too."""
        self._forget(key)
        self._outputs.abort(key)

    def _forget(self, key: RequestKey) -> None:
        """Frees the blocks, running or held."""
        self._scheduler.abort(key)
        self._prompts.pop(key, None)


def run(settings: WorkerSettings) -> int:
    """A prefill worker process, until a signal. Returns the exit code.

    Raises:
        StartError: it cannot start like this.
    """
    runner, served = load_served(settings)
    incarnation = new_incarnation()
    process = WorkerProcess(settings, Role.PREFILL, incarnation)
    kv_cache = runner.kv_cache
    data = open_data_plane(
        settings, process.context, incarnation, kv_cache, served.layout, kv_cache.host, kv_cache.staged
    )
    blocks = BlockManager(kv_cache.num_blocks, settings.block_size)
    context = WorkerContext(
        mailbox=process.mailbox,
        outputs=OutputStore(settings.keep_outputs_s, settings.max_queue + settings.max_num_seqs),
        incarnation=incarnation,
        vocab_size=served.vocab_size,
        clock=time.monotonic,
    )
    scheduler = PrefillScheduler(
        blocks,
        max_batch_tokens=settings.max_batch_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_queue=settings.max_queue,
        prefixes=Prefixes(blocks, served.fingerprint if settings.prefix_cache else None),
    )
    sender = KVSender(
        incarnation=incarnation, layout=served.layout, fingerprint=served.fingerprint, lease_s=settings.lease_s
    )
    worker = PrefillWorker(context, runner, scheduler, sender, data.outlet, blocks, settings.lease_s)
    return process.serve(served, data.transport, worker.loop)
