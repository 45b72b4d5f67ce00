"""Whatever happens, in whatever order: each request ends once, its tokens come in order, and nobody is forgotten."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.errors import NoWorkers
from kvrelay.gateway.fate import Again, Effect, End, Fate, Send, Tokens
from kvrelay.gateway.flight import Submission
from kvrelay.gateway.router import Router
from kvrelay.messages import Abort, DecodeStarted, OutputAck, RequestFailed, Resend, StepOutput, TokenOutput
from kvrelay.types import FinishReason, SamplingParams
from tests.gateway.nouns import GATEWAY, route

PREFILL, DECODE, BOTH = (10, 11), (20, 21, 22), (30,)
WORKERS = (*PREFILL, *DECODE, *BOTH)
MAX_TOKENS = 5
RESEND_S, TIMEOUT_S = 5.0, 100.0


@dataclass
class Asked:
    """What the outside world knows about a request."""

    workers: tuple[int, ...]
    num_samples: int
    attempt: int = 0
    given_up: set[int] = field(default_factory=set)  # workers that said they dropped it, or were never reached
    delivered: dict[int, list[TokenOutput]] = field(default_factory=dict)
    num_ends: int = 0
    told: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    sent: Send | None = None


class FateMachine(RuleBasedStateMachine):
    """Drives a Fate with events that need not make sense together, and checks what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.fate = Fate(GATEWAY, self.router, resend_s=RESEND_S, request_timeout_s=TIMEOUT_S)
        self.now = 0.0
        self.asked: dict[str, Asked] = {}
        self.dead: set[int] = set()

    @rule(
        first=st.sampled_from(PREFILL),
        candidates=st.lists(st.sampled_from(DECODE), min_size=1, unique=True),
        num_samples=st.integers(1, 2),
        local=st.booleans(),
    )
    def submit(self, first: int, candidates: list[int], num_samples: int, local: bool) -> None:
        where = route(BOTH[0]) if local else route(first, *candidates)
        if self.dead & set(where.workers):
            return
        request_id = f"r{len(self.asked)}"
        asked = self.asked[request_id] = Asked(where.workers, num_samples)
        submission = Submission(request_id, (1, 2), SamplingParams(max_tokens=MAX_TOKENS), num_samples)
        effects = self.fate.submit(submission, where, self.now)
        (asked.sent,) = [effect for effect in effects if isinstance(effect, Send)]

    @rule(
        data=st.data(),
        worker=st.sampled_from(WORKERS),
        index=st.integers(0, MAX_TOKENS + 1),
        count=st.integers(1, 3),
        attempt=st.integers(0, 1),
        sample=st.integers(0, 2),
    )
    def tokens(self, data: st.DataObject, worker: int, index: int, count: int, attempt: int, sample: int) -> None:
        outputs = tuple(
            TokenOutput(
                request_id=self.any_request(data),
                attempt=attempt if each == 0 else 0,
                sample=sample,
                index=index + each,
                token_id=index + each,
                finish_reason=FinishReason.LENGTH if index + each >= MAX_TOKENS - 1 else None,
            )
            for each in range(count)
        )
        self.hear(worker, StepOutput(source=worker, outputs=outputs))

    @rule(data=st.data(), worker=st.sampled_from(WORKERS), attempt=st.integers(0, 1))
    def decode_started(self, data: st.DataObject, worker: int, attempt: int) -> None:
        self.hear(worker, DecodeStarted(source=worker, request_id=self.any_request(data), attempt=attempt))

    @rule(
        data=st.data(),
        worker=st.sampled_from(WORKERS),
        code=st.sampled_from(["draining", "hand_over_failed"]),
        attempt=st.integers(0, 1),
    )
    def failed(self, data: st.DataObject, worker: int, code: str, attempt: int) -> None:
        request_id = self.any_request(data)
        if request_id in self.asked and self.asked[request_id].attempt == attempt:
            self.asked[request_id].given_up.add(worker)
        message = RequestFailed(source=worker, request_id=request_id, attempt=attempt, code=code, message="No.")
        self.hear(worker, message)

    @rule(worker=st.sampled_from(WORKERS))
    def lost(self, worker: int) -> None:
        self.dead.add(worker)
        self.check(self.fate.on_worker_lost(worker))

    @rule()
    def all_restarted(self) -> None:
        for worker in self.dead:
            for asked in self.asked.values():
                asked.given_up.add(worker)
        self.dead.clear()

    @rule(data=st.data(), how=st.sampled_from(["gone", "stop", "unsent"]))
    def given_up(self, data: st.DataObject, how: str) -> None:
        request_id = self.any_request(data)
        asked = self.asked.get(request_id)
        if how == "gone":
            self.check(self.fate.client_gone(request_id, "The client left."))
        elif how == "stop":
            self.check(self.fate.stop(request_id))
        elif asked is not None and asked.sent is not None:
            asked.given_up.add(asked.sent.peer)
            self.check(self.fate.on_unsent(asked.sent))

    @rule(seconds=st.floats(0.1, 40.0))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.check(self.fate.tick(self.now))

    @precondition(lambda self: len(self.fate) > 3)
    @rule()
    def shut_down(self) -> None:
        self.check(self.fate.shut_down())

    def any_request(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(["unknown", *self.asked]))

    def hear(self, worker: int, message: StepOutput | DecodeStarted | RequestFailed) -> None:
        if worker not in self.dead:
            self.check(self.fate.on_message(worker, message, self.now))

    def check(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, Abort() as abort) if abort.request_id in self.asked:
                    self.asked[abort.request_id].told.add(peer)
                case Send(peer, OutputAck() as acknowledged):
                    self.asked[acknowledged.request_id].acknowledged.add(peer)
                case Send(peer, Resend() as resend):
                    assert peer in self.asked[resend.request_id].workers
                case Tokens(request_id, outputs):
                    self.deliver(self.asked[request_id], outputs)
                case Again(request_id, avoid):
                    self.try_again(request_id, avoid)
                case End(request_id, error):
                    self.end(self.asked[request_id], failed=error is not None)

    def try_again(self, request_id: str, avoid: int) -> None:
        asked = self.asked[request_id]
        assert asked.attempt == 0, "once"
        assert set(asked.workers) - self.dead - asked.given_up <= asked.told, "whoever may hold it is told"
        alive = [worker for worker in DECODE if worker not in self.dead]
        if PREFILL[1] in self.dead or not alive:
            self.check(self.fate.give_up(request_id, NoWorkers("There is none.")))
            return
        where = route(PREFILL[1], *alive).avoiding(avoid)
        asked.attempt, asked.workers, asked.given_up, asked.told = 1, where.workers, set(), set()
        (sent,) = self.fate.again(request_id, where)
        assert isinstance(sent, Send)
        asked.sent = sent

    def deliver(self, asked: Asked, outputs: tuple[TokenOutput, ...]) -> None:
        assert asked.num_ends == 0, "nothing comes after the end"
        for output in outputs:
            of_sample = asked.delivered.setdefault(output.sample, [])
            assert output.index == len(of_sample), "in order, each once"
            assert not (of_sample and of_sample[-1].finish_reason), "nothing comes after the last token"
            of_sample.append(output)

    def end(self, asked: Asked, *, failed: bool) -> None:
        asked.num_ends += 1
        assert asked.num_ends == 1, "each request ends once"
        finished = [bool(tokens and tokens[-1].finish_reason) for tokens in asked.delivered.values()]
        if len(finished) == asked.num_samples and all(finished) and not failed:
            assert len(asked.acknowledged) == 1
        else:
            assert set(asked.workers) - self.dead - asked.given_up <= asked.told, "whoever may hold it is told"

    @invariant()
    def nothing_is_left_of_what_ended(self) -> None:
        open_requests = [asked for asked in self.asked.values() if asked.num_ends == 0]
        assert len(self.fate) == len(open_requests)
        counted = sum(self.router.own(worker).sequences for worker in WORKERS)
        assert counted == sum(asked.num_samples for asked in open_requests)
        assert all(self.router.own(worker).prompt_tokens >= 0 for worker in WORKERS)
        assert self.router.idle == (not open_requests)

    def teardown(self) -> None:
        self.now += TIMEOUT_S
        self.check(self.fate.tick(self.now))
        assert all(asked.num_ends == 1 for asked in self.asked.values()), "none hangs: every wait has a deadline"
        assert len(self.fate) == 0
        assert self.router.idle


TestFateMachine = FateMachine.TestCase
TestFateMachine.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
