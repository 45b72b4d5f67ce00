"""The gateway without HTTP and sockets: ties cluster, router and fate to the answers that clients wait for."""

import logging
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvrelay.config import GatewaySettings
from kvrelay.errors import ClientGone, Draining, NoWorkers, Overloaded, RequestError
from kvrelay.events import Event, RequestTimeline
from kvrelay.gateway.cluster import Cluster, Loss, Worker
from kvrelay.gateway.fate import Again, Effect, End, Fate, Send, Tokens
from kvrelay.gateway.flight import Submission
from kvrelay.gateway.generation import Generation
from kvrelay.gateway.metrics import ClusterCollector, Metrics
from kvrelay.gateway.router import Router
from kvrelay.messages import AnyMessage, DecodeStarted, GatewayHello, Message, RequestEvents, WorkerHello, WorkerStatus
from kvrelay.types import Incarnation, SamplingParams

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


class Service:
    """Everything a gateway does between a prompt's token ids and those of its answer.

    `send` hands a message to a worker and says whether it could; `clock` is monotonic, in seconds. Not thread-safe:
    it lives in one event loop.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        model: str,
        fingerprint: str,
        incarnation: Incarnation,
        send: Callable[[Incarnation, Message], bool],
        clock: Callable[[], float],
    ) -> None:
        """No worker is known yet."""
        self.settings = settings
        self.model = model
        self.cluster = Cluster(model, fingerprint, death_s=settings.death_s)
        self.router = Router()
        self.metrics = Metrics()
        self.fate = Fate(
            incarnation, self.router, resend_s=settings.resend_s, request_timeout_s=settings.request_timeout_s
        )
        self._incarnation = incarnation
        self._send = send
        self._clock = clock
        self._generations: dict[str, Generation] = {}
        self._num_admitted = 0
        self._stopping = False
        self._socket_counters: Counter[str] = Counter()

    # towards clients

    @contextmanager
    def admission(self) -> Iterator[RequestTimeline]:
        """A place among the requests in flight, from arrival to the last byte.

        Raises:
            Overloaded: all are taken.
            Draining: the gateway is shutting down.
        """
        if self._stopping:
            raise Draining("The gateway is shutting down; send the request again.")
        if self._num_admitted >= self.settings.max_requests:
            raise Overloaded(
                f"{self._num_admitted} requests are in flight, which is the limit; try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_admitted += 1
        self.metrics.in_flight.set(self._num_admitted)
        try:
            yield RequestTimeline(self._clock())
        finally:
            self._num_admitted -= 1
            self.metrics.in_flight.set(self._num_admitted)

    def max_model_len(self) -> int:
        """Tokens of the longest request that can be served now.

        Raises:
            NoWorkers: none can be; the text says why.
        """
        if not self.cluster.ready:
            raise NoWorkers(self.cluster.why_not_ready, retry_after_s=RETRY_AFTER_S)
        return self.cluster.max_model_len

    def submit(
        self,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        timeline: RequestTimeline,
        *,
        param: str,
        cache_salt: str = "",
    ) -> Generation:
        """Sends a request to workers. Its id is drawn here, so that no client's name for it can collide.

        Raises:
            NoWorkers, ContextLengthExceeded: see `Router.choose`; `param` names the prompt in errors.
        """
        route = self.router.choose(self.cluster, len(prompt_token_ids), param=param)
        now = self._clock()
        generation = Generation(uuid.uuid4().hex, prompt_token_ids, timeline)
        timeline.stamp(Event.ADMITTED, now)
        self._generations[generation.request_id] = generation
        self.metrics.prompt_tokens.inc(len(prompt_token_ids))
        submission = Submission(generation.request_id, prompt_token_ids, params, cache_salt=cache_salt)
        self._apply(self.fate.submit(submission, route, now))
        return generation

    def stop_string_found(self, generation: Generation) -> None:
        """The text is complete; workers need not go on."""
        self._apply(self.fate.stop(generation.request_id))

    def client_gone(self, generation: Generation, reason: str) -> None:
        """Nobody waits for the answer any more; nothing happens if it is complete."""
        self._apply(self.fate.client_gone(generation.request_id, reason))

    # towards workers

    def on_message(self, peer: Incarnation, message: AnyMessage) -> None:
        """A worker says something."""
        now = self._clock()
        match message:
            case WorkerHello():
                self._on_hello(message, now)
            case WorkerStatus():
                self._on_status(message, now)
            case _:
                self.cluster.on_heard(peer, now)
                self._note_events(message, now)
                self._apply(self.fate.on_message(peer, message, now))

    def on_lost(self, workers: Iterable[Incarnation]) -> None:
        """Connections to workers were lost."""
        for worker in workers:
            loss = self.cluster.on_lost(worker, self._clock())
            self._bury([] if loss is None else [loss])
            self._apply(self.fate.on_worker_lost(worker))  # also one that was silent, or has not said who it is

    def tick(self) -> None:
        """Time has passed; call this several times a second."""
        now = self._clock()
        self._bury(self.cluster.tick(now))
        self._apply(self.fate.tick(now))

    def beat(self) -> None:
        """The heartbeat to every worker."""
        for worker in self.cluster.workers:
            self._greet(worker.incarnation, registered=True)

    def shut_down(self) -> None:
        """Ends every request, and takes no new ones."""
        self._stopping = True
        self._apply(self.fate.shut_down())

    def snapshot(self) -> dict[str, Any]:
        """The state of the cluster as JSON values, for `/cluster`."""
        snapshot = self.cluster.snapshot(self._clock())
        for shown, worker in zip(snapshot["workers"], self.cluster.workers, strict=True):
            sent = self.router.own(worker.incarnation)
            shown["sent"] = {"prompt_tokens": sent.prompt_tokens, "sequences": sent.sequences}
        return {
            **snapshot,
            "incarnation": f"{self._incarnation:016x}",
            "num_requests": len(self.fate),
            "counters": dict(self.counters),
        }

    @property
    def counters(self) -> Counter[str]:
        """What was odd about the messages of workers, and how often."""
        return self.fate.counters + self._socket_counters

    def watch_workers(self, socket_counters: Counter[str]) -> None:
        """Adds the workers to the metrics, and what their socket counts to the counters."""
        self._socket_counters = socket_counters
        self.metrics.registry.register(ClusterCollector(self.cluster, lambda: self.counters))

    def _on_hello(self, hello: WorkerHello, now: float) -> None:
        known = hello.source in self.cluster
        self._bury(self.cluster.on_hello(hello, now))
        self._greet(hello.source, registered=True)
        if not known and (worker := self.cluster.get(hello.source)) is not None:
            _log_arrival(worker, self.cluster.why_unused(worker))

    def _on_status(self, status: WorkerStatus, now: float) -> None:
        if self.cluster.on_status(status, now):
            self.router.on_status(status)
        else:
            self._greet(status.source, registered=False)

    def _greet(self, worker: Incarnation, *, registered: bool) -> None:
        self._send(worker, GatewayHello(source=self._incarnation, target=worker, registered=registered))

    def _bury(self, losses: Iterable[Loss]) -> None:
        for loss in losses:
            log.log(logging.DEBUG if self._stopping else logging.WARNING, "%s is lost: %s.", loss.name, loss.reason)
            self.router.on_lost(loss.incarnation)
            self._apply(self.fate.on_worker_lost(loss.incarnation))

    def _note_events(self, message: AnyMessage, now: float) -> None:
        if not isinstance(message, DecodeStarted | RequestEvents) or not self.fate.owns(message.key):
            return
        ages_s = message.ages_s if isinstance(message, RequestEvents) else {Event.DECODE_BEGIN: 0.0}
        for event, age_s in ages_s.items():
            self._generations[message.request_id].timeline.stamp(event, now - age_s)

    # what follows

    def _apply(self, effects: Iterable[Effect]) -> None:
        """Carries effects out, and those that follow when a message cannot be sent."""
        queue = deque(effects)
        while queue:
            match queue.popleft():
                case Send(peer, message) as unsent:
                    if not self._send(peer, message):
                        queue.extend(self.fate.on_unsent(unsent))
                case Tokens(request_id) as tokens:
                    self._deliver(self._generations[request_id], tokens)
                case Again() as again:
                    queue.extend(self._try_again(again))
                case End(request_id) as end:
                    self._end(self._generations.pop(request_id), end)

    def _try_again(self, again: Again) -> list[Effect]:
        log.warning("Request %s is tried again: %s", again.request_id, again.reason)
        try:
            prompt = self._generations[again.request_id].prompt_token_ids
            route = self.router.choose(self.cluster, len(prompt)).avoiding(again.avoid)
        except RequestError as error:
            return self.fate.give_up(again.request_id, error)
        return self.fate.again(again.request_id, route)

    def _deliver(self, generation: Generation, tokens: Tokens) -> None:
        now = self._clock()
        for _ in tokens.outputs:
            self.metrics.on_token(generation.timeline, now)
        known = generation.cached_tokens
        generation.put(tokens.outputs)
        self.metrics.cached_tokens.inc(generation.cached_tokens - known)

    def _end(self, generation: Generation, end: End) -> None:
        event = Event.FINISHED if end.error is None else Event.FAILED
        event = Event.CANCELLED if isinstance(end.error, ClientGone) else event
        generation.timeline.stamp(event, self._clock())
        if event is Event.FAILED:
            log.warning("Request %s failed: %s", generation.request_id, end.error)
        self.metrics.on_end(generation.timeline)
        generation.end(end.error)


def _log_arrival(worker: Worker, why_unused: str) -> None:
    hello = worker.hello
    log.info("%s (%s) registered from %s. %s", hello.name, worker.role, hello.control_endpoint, why_unused)
