"""Compares answers bit by bit: token ids and logprobs, never text. No I/O."""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from kvrelay.bench.verify_plan import Question


class AnswerToken(NamedTuple):
    """A token of an answer; `top` names the likeliest at its place, in order."""

    token_id: int
    logprob: float
    top: tuple[tuple[str, float], ...]

    @property
    def bits(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The logprobs so that equal means equal in every bit, also of zeros."""
        return self.logprob.hex(), tuple((name, logprob.hex()) for name, logprob in self.top)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request: tokens and why they ended, or `error`, a sentence."""

    tokens: tuple[AnswerToken, ...] = ()
    finish_reason: str = ""
    cached_tokens: int = 0  # of its prompt; no part of the answer
    error: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first leaves the one it should be: at token `index`, or in its end as a whole (None)."""

    request: int
    what: str
    index: int | None = None
    expected: AnswerToken | None = None
    got: AnswerToken | None = None

    def __str__(self) -> str:
        where = "" if self.index is None else f", token {self.index}"
        return f"request {self.request}{where}: {self.what}"

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        tokens = {"expected": self.expected, "got": self.got}
        told = {name: token and {"id": token.token_id, "logprob": token.logprob} for name, token in tokens.items()}
        return {"request": self.request, "index": self.index, "what": self.what, **told}


def difference(request: int, expected: Answer, got: Answer) -> Difference | None:
    """The first difference between two answers to one question; None if they are the same."""
    if got.error:
        return Difference(request, f"it failed: {got.error}")
    for index, (left, right) in enumerate(zip_longest(expected.tokens, got.tokens)):
        if what := _token_difference(left, right):
            return Difference(request, what, index, left, right)
    if expected.finish_reason != got.finish_reason:
        return Difference(request, f"it ended by {got.finish_reason}, not by {expected.finish_reason}")
    return None


def _token_difference(expected: AnswerToken | None, got: AnswerToken | None) -> str:
    if expected is None or got is None:
        return "one answer ends, the other goes on"
    if expected.token_id != got.token_id:
        return f"id {got.token_id} ({got.logprob!r}), not {expected.token_id} ({expected.logprob!r})"
    if expected.logprob.hex() != got.logprob.hex():
        return f"id {got.token_id}, logprob {got.logprob!r}, not {expected.logprob!r}"
    return "" if expected.bits == got.bits else f"id {got.token_id}, other likeliest tokens"


@dataclass(slots=True)
class Arm:
    """What came of all requests to one endpoint; `compared` of them had an answer to be compared with."""

    name: str
    requests: int = 0
    compared: int = 0
    mismatches: int = 0
    first: Difference | None = None
    cached_tokens: int = 0
    preempted: int = 0  # sequences, as the workers counted

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        plain = {name: getattr(self, name) for name in ("name", "requests", "compared", "mismatches")}
        evidence = {"cached_tokens": self.cached_tokens, "preempted": self.preempted}
        return {**plain, **evidence, "first_difference": self.first and self.first.record}


@dataclass(slots=True)
class Comparison:
    """All arms so far. The first answer to a question is what every later one must equal, in any arm."""

    arms: list[Arm] = field(default_factory=list)
    _known: dict[int, Answer] = field(default_factory=dict)

    def begin(self, name: str) -> Arm:
        """From here on answers are those of a new arm."""
        self.arms.append(Arm(name))
        return self.arms[-1]

    def add(self, question: Question, answer: Answer) -> None:
        """An answer came. One that failed is a mismatch, and nothing that others could be compared with.

        Raises:
            ValueError: no arm has begun.
        """
        if not self.arms:
            raise ValueError("An answer came before the first arm; call begin() first.")
        arm = self.arms[-1]
        number, expected = arm.requests, self._known.get(question.number)
        arm.requests += 1
        arm.cached_tokens += answer.cached_tokens
        arm.compared += expected is not None
        if expected is None and not answer.error:
            self._known[question.number] = answer
        found = difference(number, expected or answer, answer)
        arm.mismatches += found is not None
        arm.first = arm.first or found

    @property
    def requests(self) -> int:
        """Of all arms."""
        return sum(arm.requests for arm in self.arms)

    @property
    def mismatches(self) -> int:
        """Of all arms."""
        return sum(arm.mismatches for arm in self.arms)
