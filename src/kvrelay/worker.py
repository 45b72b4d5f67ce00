"""What prefill and decode workers have in common: the compute loop, and what they say to gateways."""

import logging
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvrelay.errors import InvalidRequest, RequestError, UnknownRequest
from kvrelay.mailbox import (
    Event,
    FromGateway,
    GatewayLost,
    Mailbox,
    PayloadSent,
    PieceArrived,
    PieceWaiting,
    Stop,
    ToGateway,
)
from kvrelay.messages import (
    Abort,
    AboutPrompt,
    Drain,
    Ledger,
    Message,
    OutputAck,
    PairStatus,
    RequestFailed,
    Resend,
    StepOutput,
    TokenOutput,
    WorkerLoad,
    WorkerStatus,
)
from kvrelay.outputs import OutputStore
from kvrelay.types import Batch, FinishReason, Incarnation, RequestKey, SampledToken, Sequence

log = logging.getLogger(__name__)

MAX_IDLE_S = 0.25
MAX_STEP_BYTES = 8 * 2**20  # of payload, verified between two steps: a few milliseconds
MAX_OUTPUTS = 1024  # tokens in a message, at most 1.5 KB each with all their logprobs: far below what a socket takes


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What every worker is given. `clock` is monotonic, in seconds."""

    mailbox: Mailbox
    outputs: OutputStore
    incarnation: Incarnation
    vocab_size: int
    clock: Callable[[], float]


class Worker(ABC):
    """The compute loop: take messages, schedule, run and complete. A role says what each of them means.

    Runs in one thread. Sockets are the control thread's; the mailbox is all that is known of them.
    """

    def __init__(self, context: WorkerContext) -> None:
        """Shares the context's mailbox with the control thread and owns the rest."""
        self._mailbox = context.mailbox
        self._outputs = context.outputs
        self._incarnation = context.incarnation
        self._vocab_size = context.vocab_size
        self._clock = context.clock
        self._counters: Counter[str] = Counter()
        self._draining = False
        self._ledger_fault = False
        self._stopped = False

    def loop(self) -> None:
        """Until `Stop` is in the mailbox."""
        patience_s = 0.0
        while self.take_messages(patience_s):
            batch = self.schedule()
            self.complete(batch, self._try_compute(batch))
            self._mailbox.status = self._status()
            if not batch:
                self._check_ledger(self._mailbox.status.ledger)
            patience_s = 0.0 if batch else self._until_deadline()

    def take_messages(self, timeout_s: float) -> bool:
        """Handles what came, waiting at most `timeout_s` for a first event. False when the worker should end.

        Of KV that arrived it takes a bounded number of bytes, so that running sequences do not wait for long.
        """
        for event in self._mailbox.take(timeout_s):
            self._handle(event)
        room = MAX_STEP_BYTES
        while room > 0 and (piece := self._mailbox.next_piece()):
            room -= self.take_piece(piece)
        self.tick(self._clock())
        return not self._stopped

    @abstractmethod
    def schedule(self) -> Batch:
        """What to compute next."""

    @abstractmethod
    def compute(self, batch: Batch) -> list[SampledToken | None]:
        """Runs the batch: for each of its sequences the sampled token, or None."""

    @abstractmethod
    def complete(self, batch: Batch, sampled: list[int | None]) -> None:
        """Takes note of what the batch gave."""

    @abstractmethod
    def handle(self, event: Event) -> None:
        """An event that is the role's own business."""

    @abstractmethod
    def take_piece(self, piece: PieceArrived) -> int:
        """A piece of KV came. Returns how many bytes of payload were looked at, or some for the trouble."""

    @abstractmethod
    def abort(self, key: RequestKey) -> None:
        """Drops every attempt of the request up to this one."""

    @abstractmethod
    def abort_all(self, gateway: Incarnation) -> None:
        """Drops what a lost gateway owned."""

    @abstractmethod
    def distrust(self, sequence: Sequence) -> None:
        """The KV of a sequence may be wrong."""

    @abstractmethod
    def drain(self) -> None:
        """Takes nothing new from here on."""

    @abstractmethod
    def tick(self, now: float) -> None:
        """Time has passed."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When `tick` should be called at the latest."""

    @abstractmethod
    def load(self) -> tuple[Ledger, WorkerLoad, Counter[str]]:
        """For the heartbeat: blocks, work, and the role's own counters."""

    @abstractmethod
    def is_idle(self) -> bool:
        """True when no block should be in use, by anybody."""

    def pairs(self) -> tuple[PairStatus, ...]:
        """For the heartbeat: hand-overs by receiver."""
        return ()

    def tell(self, gateway: Incarnation, message: Message) -> None:
        """Says something to a gateway."""
        self._mailbox.post([ToGateway(gateway, message)])

    def fail(self, gateway: Incarnation, key: RequestKey, code: str, message: str) -> None:
        """Tells the gateway that this attempt ends here."""
        self._counters["failed_request"] += 1
        self.tell(gateway, RequestFailed(**self.about(gateway, key), code=code, message=message))

    def report(self, outputs: Iterable[tuple[Incarnation, TokenOutput]]) -> None:
        """Sends tokens: one message for each gateway, or several if there are very many."""
        by_gateway: defaultdict[Incarnation, list[TokenOutput]] = defaultdict(list)
        for gateway, output in outputs:
            by_gateway[gateway].append(output)
        for gateway, of_gateway in by_gateway.items():
            for start in range(0, len(of_gateway), MAX_OUTPUTS):
                part = tuple(of_gateway[start : start + MAX_OUTPUTS])
                self.tell(gateway, StepOutput(source=self._incarnation, target=gateway, outputs=part))

    def keep(self, sequence: Sequence, index: int, token_id: int, finish_reason: FinishReason | None) -> TokenOutput:
        """Generated token `index`, the last one, as gateways are told it, kept so that it can be told again."""
        output = TokenOutput(
            request_id=sequence.key.request_id,
            attempt=sequence.key.attempt,
            sample=sequence.sample,
            index=index,
            token_id=token_id,
            finish_reason=finish_reason,
            cached_tokens=sequence.num_cached_tokens if index == 0 else 0,
            logprobs=sequence.logprobs,
        )
        self._outputs.add(output, self._clock())
        return output

    def new_sequence(self, gateway: Incarnation, request: AboutPrompt) -> Sequence:
        """The sequence that a request asks for.

        Raises:
            InvalidRequest: a token id is not in the vocabulary.
        """
        if max(request.prompt_token_ids) >= self._vocab_size:
            raise InvalidRequest(
                f"Token id {max(request.prompt_token_ids)} is not in the vocabulary of {self._vocab_size} tokens."
            )
        return Sequence(
            key=request.key,
            sample=0,
            gateway=gateway,
            params=request.params,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            cache_salt=request.cache_salt,
        )

    def _try_compute(self, batch: Batch) -> list[int | None]:
        """The token ids of a step. Logprobs wait with their sequence, of whose last token they will be, to be told.

        A step that fails ends the requests in it, not the worker. What made it fail may lie in KV that others would
        find, and then every request that begins alike would fail.
        """
        try:
            sampled = self.compute(batch)
        except RequestError as error:
            log.exception("A step of %d sequences failed; their requests end here.", len(batch.scheduled))
            for item in batch.scheduled:
                self.fail(item.sequence.gateway, item.sequence.key, error.code, error.message)
                self.distrust(item.sequence)
                self.abort(item.sequence.key)
            return [None] * len(batch.scheduled)
        self._counters["computed_tokens"] += batch.num_tokens
        for item, token in zip(batch.scheduled, sampled, strict=True):
            item.sequence.logprobs = None if token is None else token.logprobs
        return [None if token is None else token.token_id for token in sampled]

    def _handle(self, event: Event) -> None:
        match event:
            case FromGateway(_, Abort() as abort):
                self.abort(abort.key)
            case FromGateway(gateway, Resend() as resend):
                self._resend(gateway, resend)
            case FromGateway(_, OutputAck() as ack):
                self._outputs.ack(ack.key)
            case FromGateway(_, Drain()):
                self._draining = True
                self.drain()
            case GatewayLost(gateway):
                self.abort_all(gateway)
            case PayloadSent() | PieceWaiting():
                return
            case Stop():
                self._stopped = True
            case _:
                self.handle(event)

    def _resend(self, gateway: Incarnation, resend: Resend) -> None:
        outputs = self._outputs.resend(resend.key, resend.sample, resend.from_index)
        if outputs is None:
            error: RequestError = UnknownRequest(
                f"Worker has no request {resend.request_id}, so nothing to send again."
            )
            self.fail(gateway, resend.key, error.code, error.message)
        else:
            self.report((gateway, output) for output in outputs)

    def about(self, gateway: Incarnation, key: RequestKey) -> dict[str, Any]:
        """The fields of a message to a gateway about one attempt."""
        return {
            "source": self._incarnation,
            "target": gateway,
            "request_id": key.request_id,
            "attempt": key.attempt,
        }

    def _until_deadline(self) -> float:
        if self._mailbox.has_pieces:
            return 0.0
        deadline = self.next_deadline()
        return MAX_IDLE_S if deadline is None else min(max(deadline - self._clock(), 0.0), MAX_IDLE_S)

    def _status(self) -> WorkerStatus:
        ledger, load, counters = self.load()
        return WorkerStatus(
            source=self._incarnation,
            ledger=ledger,
            load=load,
            draining=self._draining,
            counters=dict(self._counters + counters),
            pairs=self.pairs(),
        )

    def _check_ledger(self, ledger: Ledger) -> None:
        """Says it aloud, once each time, when blocks are lost or counted twice, or in use though nothing is there."""
        fault = not ledger.conserved or (self.is_idle() and bool(ledger.leased or ledger.revoked))
        if fault and not self._ledger_fault:
            self._counters["ledger_violation"] += 1
            log.error("KV blocks do not add up: %s. Restart this worker, and report this.", ledger)
        self._ledger_fault = fault
