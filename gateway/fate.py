"""The fate of every request: each one that was accepted ends exactly once, through this state machine.

    submit ──▶ PREFILL ── DecodeStarted, or a token from a candidate ──▶ DECODE ── last token ──▶ end
                  │  P lost · P failed · no candidate left                  │  D lost · D failed · D silent
                  └──────────────── deadline · client gone · stop ──────────┴──▶ Abort to all, end

A hand-over that failed before anybody generates is no end but, once, a new attempt (`Again`) under the next number. The
client may have the first token already, so the new attempt must give the same one.

In PREFILL the first worker answers for the request and any candidate may be about to hold it; in DECODE only the
holder does. Whoever answers for it is asked again after a silence, and one that does not know the request any more says
so, which ends it: a hand-over whose commit was lost does not leave the client waiting. A local request is in DECODE
from the start. Pure: events in, effects out, `now` in monotonic seconds.
"""

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Any

from kvrelay.errors import (
    ClientGone,
    DeadlineExceeded,
    Draining,
    HandOverFailed,
    RequestError,
    UnknownRequest,
    WorkerLost,
    from_code,
)
from kvrelay.gateway.flight import Flight, SampleTokens, Submission
from kvrelay.gateway.router import Route, Router
from kvrelay.messages import (
    Abort,
    AboutPrompt,
    AnyMessage,
    DecodeStarted,
    GenerateRequest,
    Message,
    OutputAck,
    PrefillRequest,
    RequestFailed,
    Resend,
    StepOutput,
    TokenOutput,
)
from kvrelay.types import Incarnation, RequestKey

MAX_RESENDS = 3
MAX_REASON = 4096  # characters that a message can carry


@dataclass(frozen=True, slots=True)
class Send:
    """Say something to a worker."""

    peer: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of a request; those of one sample are in order and come once."""

    request_id: str
    outputs: tuple[TokenOutput, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The request is over. Without an error every sample has said why it finished, or a stop string was found."""

    request_id: str
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """The attempt failed: call `again` with a route, if possible one that avoids a worker, or `give_up`."""

    request_id: str
    avoid: Incarnation
    reason: str


Effect = Send | Tokens | End | Again


class Fate:
    """All requests in flight of one gateway."""

    def __init__(self, incarnation: Incarnation, router: Router, *, resend_s: float, request_timeout_s: float) -> None:
        """`resend_s` is how long a decoding worker may be silent, `request_timeout_s` how long a request may live."""
        self._incarnation = incarnation
        self._router = router
        self._resend_s = resend_s
        self._request_timeout_s = request_timeout_s
        self._flights: dict[str, Flight] = {}
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._flights)

    def owns(self, key: RequestKey) -> bool:
        """True while that attempt is in flight."""
        return self._find(key) is not None

    # what the gateway wants

    def submit(self, submission: Submission, route: Route, now: float) -> list[Effect]:
        """A new request goes to its first worker.

        Raises:
            ValueError: a request with this id is in flight.
        """
        if submission.request_id in self._flights:
            raise ValueError(f"The request id {submission.request_id} is in use.")
        flight = Flight(submission, route, self._router, deadline=now + self._request_timeout_s)
        return self._launch(flight)

    def again(self, request_id: str, route: Route) -> list[Effect]:
        """A request whose attempt failed goes another way."""
        failed = self._flights[request_id]
        failed.close()
        self.counters["retries"] += 1
        return self._launch(Flight(failed.submission, route, self._router, deadline=failed.deadline, after=failed))

    def give_up(self, request_id: str, error: RequestError) -> list[Effect]:
        """There is no way for it. Nothing happens if the request has ended by itself."""
        return self._give_up(request_id, error, str(error))

    def stop(self, request_id: str) -> list[Effect]:
        """A stop string was found in the text. Nothing happens if the request has ended by itself."""
        return self._give_up(request_id, None, "a stop string was found")

    def client_gone(self, request_id: str, reason: str) -> list[Effect]:
        """Nobody wants the answer any more. Nothing happens if the request has ended by itself."""
        return self._give_up(request_id, ClientGone(reason), "the client is gone")

    def shut_down(self) -> list[Effect]:
        """The gateway leaves: every request ends."""
        error = Draining("The gateway is shutting down; send the request again.")
        return [effect for request_id in list(self._flights) for effect in self._give_up(request_id, error, str(error))]

    def _launch(self, flight: Flight) -> list[Effect]:
        self._flights[flight.key.request_id] = flight
        if flight.route.local:
            flight.decodes_at(flight.route.first, inf)  # it has no token to repeat before its first
        return [Send(flight.route.first, self._dispatch(flight))]

    # what happens

    def on_message(self, peer: Incarnation, message: AnyMessage, now: float) -> list[Effect]:
        """A worker says something about requests; other messages have no effect."""
        match message:
            case StepOutput():
                return self._on_step_output(peer, message, now)
            case DecodeStarted():
                return self._on_decode_started(peer, message, now)
            case RequestFailed():
                return self._on_request_failed(peer, message)
        return []

    def on_unsent(self, send: Send) -> list[Effect]:
        """A worker could not be reached. Only a request that never left is lost by that; all else is asked again."""
        if not isinstance(send.message, AboutPrompt) or (flight := self._find(send.message.key)) is None:
            return []
        flight.alive.discard(send.peer)
        return self._end(flight, WorkerLost("The worker chosen for the request cannot be reached; send it again."))

    def on_worker_lost(self, worker: Incarnation) -> list[Effect]:
        """A worker is dead: what it held ends, what it might have held soon goes on without it."""
        flights = [flight for flight in self._flights.values() if worker in flight.alive]
        return [effect for flight in flights for effect in self._on_lost(flight, worker)]

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: deadlines, and questions about tokens that are missing."""
        return [effect for flight in list(self._flights.values()) for effect in self._tick(flight, now)]

    # tokens

    def _on_step_output(self, peer: Incarnation, message: StepOutput, now: float) -> list[Effect]:
        by_key: dict[RequestKey, list[TokenOutput]] = {}
        for output in message.outputs:
            by_key.setdefault(output.key, []).append(output)
        return [effect for key, outputs in by_key.items() for effect in self._on_tokens(peer, key, outputs, now)]

    def _on_tokens(self, peer: Incarnation, key: RequestKey, outputs: list[TokenOutput], now: float) -> list[Effect]:
        flight = self._find(key)
        if flight is None or not flight.may_speak(peer):
            self.counters["unowned_tokens"] += len(outputs)
            return [self._abort(peer, key, "this gateway does not own the attempt")]
        taken: list[TokenOutput] = []
        for output in outputs:
            if flight.is_possible(output, peer):
                self._notice_holder(flight, peer, output.index, now)
                taken += flight.take(output, now, self._resend_s)
            else:
                self.counters["impossible_tokens"] += 1
        self.counters["repeated_tokens"] += flight.count_repeated()
        if flight.contradicted:
            return self._end(flight, HandOverFailed("The prompt, computed once more, began another answer; try again."))
        delivered: list[Effect] = [Tokens(key.request_id, tuple(taken))] if taken else []
        return delivered + (self._finish(flight) if flight.finished else [])

    def _notice_holder(self, flight: Flight, peer: Incarnation, index: int, now: float) -> None:
        """A token that the first worker does not make comes from the holder, even if DecodeStarted was lost."""
        if peer != flight.route.first or index > 0:
            flight.decodes_at(peer, now + self._resend_s)

    def _on_decode_started(self, peer: Incarnation, message: DecodeStarted, now: float) -> list[Effect]:
        flight = self._find(message.key)
        if flight is None or not flight.may_decode(peer):
            self.counters["unowned_decodes"] += 1
            return [self._abort(peer, message.key, "this gateway does not own the attempt")]
        flight.decodes_at(peer, now + self._resend_s)
        return []

    # ends

    def _on_request_failed(self, peer: Incarnation, message: RequestFailed) -> list[Effect]:
        flight = self._find(message.key)
        if flight is None or not flight.may_fail(peer):
            self.counters["unowned_failures"] += 1
            return []
        flight.alive.discard(peer)  # it has given up what it had
        if message.code == HandOverFailed.code and flight.may_be_retried:
            return [*self._abort_all(flight, message.message), Again(message.request_id, peer, message.message)]
        return self._end(flight, _told(message))

    def _on_lost(self, flight: Flight, worker: Incarnation) -> list[Effect]:
        flight.lose(worker)
        if flight.holder is not None:
            if worker != flight.holder:
                return []  # the prefill worker has done its part
            return self._end(flight, WorkerLost("The worker that generated the answer died; send the request again."))
        if worker == flight.route.first:
            return self._end(flight, WorkerLost("The worker that computed the prompt died; send the request again."))
        if not flight.candidates_left:
            return self._end(flight, WorkerLost("Every decode worker that could take the request died; send it again."))
        if flight.first_token_seen:
            # The dead one may have been given the KV, of which the prefill worker would never speak again.
            return self._end(flight, WorkerLost("A decode worker died during the hand-over; send the request again."))
        return []

    def _tick(self, flight: Flight, now: float) -> list[Effect]:
        if now >= flight.deadline:
            error: RequestError = DeadlineExceeded(
                f"The request was not finished within {self._request_timeout_s:g} s; ask for less or try again later."
            )
            return self._end(flight, error)
        if now >= flight.decode_by:
            return self._end(flight, WorkerLost("A decode worker died during the hand-over; send the request again."))
        speaker = flight.speaker
        return [] if speaker is None else self._ask_for_tokens(flight, speaker, now)

    def _ask_for_tokens(self, flight: Flight, speaker: Incarnation, now: float) -> list[Effect]:
        asked: list[Effect] = []
        for sample in flight.samples:
            if now < sample.ask_at:
                continue
            if sample.num_asked >= MAX_RESENDS:
                return self._end(flight, WorkerLost("The worker stopped sending the answer; send the request again."))
            sample.num_asked += 1
            sample.ask_at = now + self._resend_s
            self.counters["resends"] += 1
            asked.append(self._resend(flight.key, speaker, sample))
        return asked

    def _finish(self, flight: Flight) -> list[Effect]:
        self._forget(flight)
        holder = flight.route.first if flight.holder is None else flight.holder
        return [self._acknowledge(flight.key, holder), End(flight.key.request_id)]

    def _give_up(self, request_id: str, error: RequestError | None, reason: str) -> list[Effect]:
        flight = self._flights.get(request_id)
        return [] if flight is None else self._end(flight, error, reason)

    def _end(self, flight: Flight, error: RequestError | None, reason: str = "") -> list[Effect]:
        """Ends before the last token: whoever may still hold a part of it is told."""
        self._forget(flight)
        return [*self._abort_all(flight, reason or str(error)), End(flight.key.request_id, error)]

    def _abort_all(self, flight: Flight, reason: str) -> list[Effect]:
        alive = [worker for worker in flight.route.workers if worker in flight.alive]
        return [self._abort(worker, flight.key, reason) for worker in alive]

    def _forget(self, flight: Flight) -> None:
        flight.close()
        del self._flights[flight.key.request_id]

    def _find(self, key: RequestKey) -> Flight | None:
        flight = self._flights.get(key.request_id)
        return flight if flight is not None and flight.key == key else None

    # messages

    def _dispatch(self, flight: Flight) -> PrefillRequest | GenerateRequest:
        asked, route = flight.submission, flight.route
        about = {
            **self._about(flight.key, route.first),
            "prompt_token_ids": asked.prompt_token_ids,
            "params": asked.params,
            "num_samples": asked.num_samples,
            "cache_salt": asked.cache_salt,
        }
        if route.local:
            return GenerateRequest(**about)
        return PrefillRequest(**about, candidates=route.candidates)

    def _abort(self, peer: Incarnation, key: RequestKey, reason: str) -> Send:
        return Send(peer, Abort(**self._about(key, peer), reason=reason[:MAX_REASON]))

    def _acknowledge(self, key: RequestKey, peer: Incarnation) -> Send:
        return Send(peer, OutputAck(**self._about(key, peer)))

    def _resend(self, key: RequestKey, peer: Incarnation, sample: SampleTokens) -> Send:
        return Send(peer, Resend(**self._about(key, peer), sample=sample.number, from_index=sample.ask_from))

    def _about(self, key: RequestKey, peer: Incarnation) -> dict[str, Any]:
        return {"source": self._incarnation, "target": peer, "request_id": key.request_id, "attempt": key.attempt}


def _told(message: RequestFailed) -> RequestError:
    """The worker's own error, but that it does not know the request is its affair, not the client's."""
    if message.code == UnknownRequest.code:
        return WorkerLost("The worker lost the request when its connection broke; send the request again.")
    return from_code(message.code, message.message)
