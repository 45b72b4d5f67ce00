"""A Fate with shorthands for what may happen to it, and for what comes out."""

from kvrelay.errors import RequestError
from kvrelay.gateway.fate import Effect, End, Fate, Send, Tokens
from kvrelay.gateway.flight import Submission
from kvrelay.gateway.router import Route, Router
from kvrelay.messages import Abort, DecodeStarted, RequestFailed, Resend, StepOutput, TokenOutput
from kvrelay.types import SamplingParams
from tests.gateway.nouns import GATEWAY

P, D1, D2, ALONE = 10, 21, 22, 30
RESEND_S, TIMEOUT_S = 5.0, 600.0


class Bench:
    """A Fate with shorthands for what may happen to it."""

    def __init__(self) -> None:
        self.router = Router()
        self.fate = Fate(GATEWAY, self.router, resend_s=RESEND_S, request_timeout_s=TIMEOUT_S)

    def submit(
        self,
        where: Route,
        *,
        request_id: str = "r",
        max_tokens: int = 10,
        num_samples: int = 1,
        logprobs: int | None = None,
    ) -> list[Effect]:
        params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
        submission = Submission(request_id, (1, 2, 3), params, num_samples)
        return self.fate.submit(submission, where, 0.0)

    def tokens(self, worker: int, *outputs: TokenOutput, now: float = 1.0) -> list[Effect]:
        return self.fate.on_message(worker, StepOutput(source=worker, outputs=outputs), now)

    def started(self, worker: int, *, attempt: int = 0, now: float = 1.0) -> list[Effect]:
        return self.fate.on_message(worker, DecodeStarted(source=worker, request_id="r", attempt=attempt), now)

    def failed(self, worker: int, code: str = "internal_error", *, attempt: int = 0) -> list[Effect]:
        message = RequestFailed(source=worker, request_id="r", attempt=attempt, code=code, message="It broke.")
        return self.fate.on_message(worker, message, 1.0)

    def nothing_left(self) -> bool:
        return len(self.fate) == 0 and self.router.idle


def aborted(effects: list[Effect]) -> set[int]:
    return {effect.peer for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Abort)}


def resends(effects: list[Effect]) -> list[tuple[int, int]]:
    return [
        (effect.peer, effect.message.from_index)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Resend)
    ]


def indexes(effects: list[Effect]) -> list[int]:
    return [output.index for effect in effects if isinstance(effect, Tokens) for output in effect.outputs]


def ends(effects: list[Effect]) -> list[type[RequestError] | None]:
    errors = [effect.error for effect in effects if isinstance(effect, End)]
    return [None if error is None else type(error) for error in errors]
