"""The decode worker: takes KV that was computed elsewhere and generates from it, all running sequences in each step.

A worker of role `both` is the same code; gateways send it whole requests, which it also prefills.
"""

import time
from collections import Counter
from collections.abc import Iterable

from kvrelay.blocks import BlockManager
from kvrelay.config import WorkerSettings
from kvrelay.decode.scheduler import DecodeScheduler, StepToken
from kvrelay.errors import Draining, RequestError, WireError
from kvrelay.events import Event as RequestEvent
from kvrelay.mailbox import (
    Event,
    FromGateway,
    FromPeer,
    Mailbox,
    MemoryShared,
    PeerExited,
    PeerLost,
    PieceArrived,
    ToPeer,
)
from kvrelay.messages import (
    Abort,
    DecodeStarted,
    GenerateRequest,
    KVCommit,
    KVOffer,
    KVReleased,
    Ledger,
    RequestEvents,
    TokenOutput,
    WorkerLoad,
)
from kvrelay.model.runner import ModelRunner
from kvrelay.model.served import load_served
from kvrelay.outputs import OutputStore
from kvrelay.prefixes import Prefixes
from kvrelay.process import ServedModel, WorkerProcess, new_incarnation
from kvrelay.transfer.data_plane import open_data_plane
from kvrelay.transfer.ports import Inlet
from kvrelay.transfer.protocol.actions import Action, Adopt, DropSequence, Failed, Send
from kvrelay.transfer.protocol.piece import unpack
from kvrelay.transfer.protocol.receiver import KVReceiver
from kvrelay.types import Batch, FinishReason, Incarnation, RequestKey, SampledToken, Sequence
from kvrelay.worker import Worker, WorkerContext


class DecodeWorker(Worker):
    """Batches generation continuously; between steps it lands KV and grants room for more."""

    def __init__(
        self,
        context: WorkerContext,
        runner: ModelRunner,
        blocks: BlockManager,
        scheduler: DecodeScheduler,
        receiver: KVReceiver,
        inlet: Inlet,
    ) -> None:
        """Owns all of them; scheduler and receiver share `blocks`."""
        super().__init__(context)
        self._runner = runner
        self._blocks = blocks
        self._scheduler = scheduler
        self._receiver = receiver
        self._inlet = inlet
        self._gateway_of: dict[RequestKey, Incarnation] = {}

    # the loop

    def schedule(self) -> Batch:
        """Grants what there is room for, then every running sequence and some prefill."""
        max_blocks, max_sequences = self._scheduler.grant_allowance()
        self._do(self._receiver.grant(max_blocks, max_sequences - self._receiver.num_leases, self._clock()))
        return self._scheduler.schedule()

    def compute(self, batch: Batch) -> list[SampledToken | None]:
        """One forward pass, without a look at messages: a step is short."""
        layers = self._runner.run(batch)
        while True:
            try:
                next(layers)
            except StopIteration as result:
                sampled: list[SampledToken | None] = result.value
                return sampled

    def complete(self, batch: Batch, sampled: list[int | None]) -> None:
        """Every new token goes to its gateway, one message for each gateway."""
        tokens = self._scheduler.complete(batch, sampled)
        self.report([(token.sequence.gateway, self._keep(token)) for token in tokens])

    # events

    def handle(self, event: Event) -> None:
        """Whole requests from gateways, KV from senders."""
        now = self._clock()
        match event:
            case FromGateway(gateway, GenerateRequest() as request):
                self._begin(gateway, request)
            case FromPeer(peer, KVOffer() | KVCommit() | KVReleased() | Abort() as message):
                self._do(self._receiver.on_message(peer, message, now))
            case MemoryShared(peer):
                self._receiver.on_memory_shared(peer)
            case PeerLost(peer):
                self._do(self._receiver.on_peer_lost(peer, now))
            case PeerExited(peer):
                self._do(self._receiver.on_peer_exited(peer, now))
            case _:
                self._counters["unexpected_message"] += 1

    def take_piece(self, piece: PieceArrived) -> int:
        """Lands a piece whose lease is alive and whose digest is right."""
        try:
            header = unpack(piece.header)
        except WireError:
            self._counters["malformed_piece"] += 1
            return len(piece.header)
        place = self._receiver.accept(piece.peer, header)
        if place is None:
            return len(piece.header)
        if self._inlet.land(header, place, piece.payload):
            self._do(self._receiver.landed(header, self._clock()))
        else:
            self._do(self._receiver.corrupt(header, self._clock()))
        return header.payload_bytes

    def tick(self, now: float) -> None:
        """Deadlines."""
        self._outputs.expire(now)
        self._do(self._receiver.tick(now))

    def next_deadline(self) -> float | None:
        """The receiver's."""
        return self._receiver.next_deadline()

    def drain(self) -> None:
        """Offers are refused from here on, and those that wait at once."""
        self._do(self._receiver.drain())

    def abort(self, key: RequestKey) -> None:
        """Stops within one step, before or after the hand-over, and remembers it."""
        self._do(self._receiver.abort(key, self._clock()))
        self._drop(key)

    def abort_all(self, gateway: Incarnation) -> None:
        """Drops what the gateway owned, granted or running."""
        self._do(self._receiver.on_peer_lost(gateway, self._clock()))
        for key in [key for key, owner in self._gateway_of.items() if owner == gateway]:
            self.abort(key)

    def distrust(self, sequence: Sequence) -> None:
        """Nobody else is given its blocks from here on."""
        self._blocks.forget(sequence.block_table)

    def load(self) -> tuple[Ledger, WorkerLoad, Counter[str]]:
        """For the heartbeat."""
        load = self._scheduler.load.model_copy(update={"num_offers": self._receiver.num_waiting})
        return self._blocks.ledger, load, self._receiver.counters + Counter(preempted=self._scheduler.num_preempted)

    def is_idle(self) -> bool:
        """Nothing runs or waits, nothing is granted, and every sender has let go."""
        return not (self._scheduler.has_work or self._receiver.num_leases or self._receiver.num_revoked)

    # what follows

    def _begin(self, gateway: Incarnation, request: GenerateRequest) -> None:
        if request.key in self._gateway_of:
            self._counters["duplicate_request"] += 1
            return
        try:
            if self._draining:
                raise Draining("This worker is draining and takes no new requests.")
            self._scheduler.add(self.new_sequence(gateway, request))
        except RequestError as error:
            self.fail(gateway, request.key, error.code, error.message)
        else:
            self._own(gateway, request.key)

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self._mailbox.post([ToPeer(peer, message)])
                case Adopt():
                    self._adopt(action)
                case DropSequence(key):
                    self._drop(key)
                case Failed(key, gateway, code, message):
                    self.fail(gateway, key, code, message)

    def _adopt(self, action: Adopt) -> None:
        sequence = action.sequence
        self._scheduler.adopt(sequence)
        self._own(sequence.gateway, sequence.key)
        ages_s = {RequestEvent.TRANSFER_BEGIN: self._clock() - action.begun_at, RequestEvent.TRANSFER_END: 0.0}
        self.tell(sequence.gateway, RequestEvents(**self.about(sequence.gateway, sequence.key), ages_s=ages_s))
        self.tell(sequence.gateway, DecodeStarted(**self.about(sequence.gateway, sequence.key)))
        first = self._keep(StepToken(sequence, sequence.sample, 0, sequence.token_ids[-1], self._reason(sequence)))
        if first.finish_reason:  # the sender should have ended it itself; then nobody has told the gateway why
            self.report([(sequence.gateway, first)])

    def _reason(self, sequence: Sequence) -> FinishReason | None:
        config = self._runner.config
        return sequence.finish_reason(config.eos_token_ids, config.max_model_len)

    def _own(self, gateway: Incarnation, key: RequestKey) -> None:
        self._gateway_of[key] = gateway
        self._outputs.open(key, num_samples=1)

    def _keep(self, token: StepToken) -> TokenOutput:
        output = self.keep(token.sequence, token.index, token.token_id, token.finish_reason)
        if token.finish_reason:
            self._gateway_of.pop(token.sequence.key, None)
        return output

    def _drop(self, key: RequestKey) -> None:
        self._scheduler.abort(key)
        self._outputs.abort(key)
        for known in [known for known in self._gateway_of if key.covers(known)]:
            del self._gateway_of[known]


def run(settings: WorkerSettings) -> int:
    """A decode (or colocated) worker process, until a signal. Returns the exit code.

    Raises:
        StartError: it cannot start like this.
    """
    runner, served = load_served(settings)
    incarnation = new_incarnation()
    process = WorkerProcess(settings, settings.role, incarnation)
    kv_cache = runner.kv_cache
    data = open_data_plane(
        settings, process.context, incarnation, kv_cache, served.layout, kv_cache.host, kv_cache.staged
    )
    worker = build(settings, runner, served, incarnation, process.mailbox, data.inlet)
    return process.serve(served, data.transport, worker.loop)


def build(
    settings: WorkerSettings,
    runner: ModelRunner,
    served: ServedModel,
    incarnation: Incarnation,
    mailbox: Mailbox,
    inlet: Inlet,
) -> DecodeWorker:
    """A worker with nothing to do yet, over the KV cache of `runner`.

    Raises:
        MemoryShortage: the cache cannot hold one sequence of the longest context.
    """
    blocks = BlockManager(runner.kv_cache.num_blocks, settings.block_size)
    context = WorkerContext(
        mailbox=mailbox,
        outputs=OutputStore(settings.keep_outputs_s, 4 * (settings.max_queue + settings.max_num_seqs)),
        incarnation=incarnation,
        vocab_size=served.vocab_size,
        clock=time.monotonic,
    )
    prefixes = Prefixes(blocks, served.fingerprint if settings.prefix_cache else None)
    scheduler = DecodeScheduler(
        blocks,
        max_num_seqs=settings.max_num_seqs,
        max_batch_tokens=settings.max_batch_tokens,
        max_queue=settings.max_queue,
        max_model_len=served.max_model_len,
        eos_token_ids=runner.config.eos_token_ids,
        prefixes=prefixes,
    )
    receiver = KVReceiver(
        incarnation=incarnation,
        layout=served.layout,
        fingerprint=served.fingerprint,
        blocks=blocks,
        max_model_len=served.max_model_len,
        max_queue=settings.max_queue,
        max_lease_s=settings.lease_s,
        prefixes=prefixes,
    )
    return DecodeWorker(context, runner, blocks, scheduler, receiver, inlet)
