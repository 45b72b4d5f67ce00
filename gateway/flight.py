"""One request in flight: which workers may hold a part of it, and which of its tokens have come."""

from dataclasses import dataclass, field
from math import inf

from kvrelay.gateway.router import Route, Router
from kvrelay.messages import TokenOutput
from kvrelay.types import Incarnation, RequestKey, SamplingParams

MAX_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Submission:
    """What the gateway accepted. `request_id` is its own, whatever the client calls the request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    num_samples: int = 1
    cache_salt: str = ""


@dataclass(slots=True)
class SampleTokens:
    """The tokens of one sample: put in order, each once, and asked for when they are missing.

    `first` is token 0 once it was given out, in this attempt or an earlier one; then this one has to repeat it, and
    `contradicts` it if it does not. `early` holds tokens that came before an earlier one. At `ask_at` they are asked
    for, for the `num_asked`-th time without an answer.
    """

    number: int
    next_index: int = 0
    finished: bool = False
    ask_at: float = inf
    num_asked: int = 0
    num_repeated: int = 0
    first: TokenOutput | None = None
    contradicts: bool = False
    early: dict[int, TokenOutput] = field(default_factory=dict)

    @property
    def ask_from(self) -> int:
        """On a gap the first missing token. On silence the newest that came: a worker that is only slow repeats it,
        which shows that it still has the request."""
        return self.next_index if self.early else max(0, self.next_index - 1)

    def take(self, output: TokenOutput, now: float, resend_s: float) -> list[TokenOutput]:
        """Takes a token that came, and returns those that can be given out now."""
        if self.finished or output.index < self.next_index or output.index in self.early:
            self._repeat(now, resend_s)
            return []
        self.early[output.index] = output
        ready: list[TokenOutput] = []
        while not self.finished and (following := self.early.pop(self.next_index, None)) is not None:
            if following.index or self._is_new(following):
                ready.append(following)
            self.next_index += 1
            self.finished = following.finish_reason is not None
        self._wait(now, resend_s, progressed=bool(ready))
        return ready

    def _is_new(self, first: TokenOutput) -> bool:
        given, self.first = self.first, self.first or first
        self.contradicts = given is not None and given.token_id != first.token_id
        return given is None

    def _repeat(self, now: float, resend_s: float) -> None:
        self.num_repeated += 1
        if not self.early:
            self.wait_until(now + resend_s)

    def _wait(self, now: float, resend_s: float, *, progressed: bool) -> None:
        if not self.early:
            self.wait_until(now + resend_s)
        elif progressed or not self.num_asked:
            self.num_asked, self.ask_at = 0, now  # a gap

    def wait_until(self, ask_at: float) -> None:
        """The worker has just shown that it has the sample; be patient again."""
        self.num_asked, self.ask_at = 0, inf if self.finished else ask_at


class Flight:
    """One attempt at one request. Keeps the router's counts right while it lives.

    `alive` are the workers of its route that are not known to be dead or to have given it up. `holder` is the worker
    that generates, once it is known. `decode_by` is when it must be known, if that is in doubt.
    """

    def __init__(
        self, submission: Submission, route: Route, router: Router, *, deadline: float, after: "Flight | None" = None
    ) -> None:
        """The request is about to be sent to `route.first`, for the first time or `after` an attempt that failed."""
        self.key: RequestKey = RequestKey(submission.request_id, 0 if after is None else after.key.attempt + 1)
        self.submission = submission
        self.route = route
        self.deadline = deadline
        self.decode_by = inf
        self.holder: Incarnation | None = None
        self.alive = set(route.workers)
        given = [None] * submission.num_samples if after is None else [sample.first for sample in after.samples]
        self.samples: list[SampleTokens] = [SampleTokens(number, first=first) for number, first in enumerate(given)]
        self.first_token_seen = False
        self._in_doubt = False
        self._decoders = tuple(peer.incarnation for peer in route.candidates) or (route.first,)
        self._router = router
        self._counted_at = self._decoders[0]
        router.add(route.first, prompt_tokens=self._num_prompt_tokens)
        router.add(self._counted_at, sequences=submission.num_samples)

    @property
    def _num_prompt_tokens(self) -> int:
        return len(self.submission.prompt_token_ids)

    @property
    def finished(self) -> bool:
        """True when every sample has its last token."""
        return all(sample.finished for sample in self.samples)

    @property
    def contradicted(self) -> bool:
        """True when an earlier attempt gave out a first token that is none of this one's."""
        return any(sample.contradicts for sample in self.samples)

    @property
    def may_be_retried(self) -> bool:
        """True while nobody generates from it: another attempt can take its place."""
        return self.holder is None and self.key.attempt + 1 < MAX_ATTEMPTS

    @property
    def speaker(self) -> Incarnation | None:
        """Who answers for tokens: the holder, or the first worker from its token to the hand-over; None before."""
        return self.route.first if self.holder is None and self.first_token_seen else self.holder

    @property
    def candidates_left(self) -> bool:
        """True while a worker lives that could still take or has the KV."""
        return any(decoder in self.alive for decoder in self._decoders)

    def may_speak(self, peer: Incarnation) -> bool:
        """True for a worker that may say something about this attempt."""
        return peer == self.route.first or self.may_decode(peer)

    def may_decode(self, peer: Incarnation) -> bool:
        """True for the holder, or while there is none for each that may become it."""
        return peer in self._decoders if self.holder is None else peer == self.holder

    def may_fail(self, peer: Incarnation) -> bool:
        """True for a worker whose failure ends the attempt: not the first one's any more once another generates."""
        return self.may_decode(peer) or (self.holder is None and peer == self.route.first)

    def is_possible(self, output: TokenOutput, peer: Incarnation) -> bool:
        """False for a token that this worker cannot have made: a first worker that does not decode makes one.

        Nor can the whole prompt have been cached, since its last token was computed, nor a part of it with a later one.
        Logprobs come exactly if they were asked for, and no more than that.
        """
        within = output.sample < len(self.samples) and output.index < self.submission.params.max_tokens
        countable = output.cached_tokens < (1 if output.index else self._num_prompt_tokens)
        num_asked, told = self.submission.params.logprobs, output.logprobs
        asked = told is None if num_asked is None else told is not None and len(told.top) <= num_asked
        return within and countable and asked and (output.index == 0 or self.may_decode(peer))

    def decodes_at(self, peer: Incarnation, ask_at: float) -> None:
        """The holder is known; from `ask_at` on its silence is noticed."""
        if self.holder is not None:
            return
        self.holder, self.decode_by = peer, inf
        self.alive.add(peer)  # one that was thought dead and speaks is not
        self._count_at(peer)
        for sample in self.samples:
            sample.wait_until(ask_at)

    def take(self, output: TokenOutput, now: float, resend_s: float) -> list[TokenOutput]:
        """Takes a possible token, and returns those that can be given out now."""
        if not self.first_token_seen:
            self._see_first_token(now + resend_s)
        return self.samples[output.sample].take(output, now, resend_s)

    def count_repeated(self) -> int:
        """Tokens that came again since the last call."""
        repeated = sum(sample.num_repeated for sample in self.samples)
        for sample in self.samples:
            sample.num_repeated = 0
        return repeated

    def lose(self, worker: Incarnation) -> None:
        """A worker is dead. If it may have been given the KV, the holder must be known soon after the first token."""
        self.alive.discard(worker)
        self._in_doubt = True
        if self.holder is None and worker == self._counted_at and self.candidates_left:
            self._count_at(next(decoder for decoder in self._decoders if decoder in self.alive))

    def close(self) -> None:
        """The flight is over; the router forgets it."""
        if not self.first_token_seen:
            self._router.add(self.route.first, prompt_tokens=-self._num_prompt_tokens)
        self._router.add(self._counted_at, sequences=-len(self.samples))

    def _see_first_token(self, decode_by: float) -> None:
        self.first_token_seen = True
        self._router.add(self.route.first, prompt_tokens=-self._num_prompt_tokens)
        if self._in_doubt and self.holder is None:
            self.decode_by = decode_by

    def _count_at(self, worker: Incarnation) -> None:
        self._router.add(self._counted_at, sequences=-len(self.samples))
        self._counted_at = worker
        self._router.add(worker, sequences=len(self.samples))
