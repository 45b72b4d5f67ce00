"""Chooses workers by least load.

Statuses of workers are up to a heartbeat old, and many requests can be sent in that time, so the gateway counts what
it has sent itself and adds only what it learns about the requests of other gateways. Pure: no I/O, no clock.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.errors import ContextLengthExceeded, NoWorkers
from kvrelay.gateway.cluster import Cluster, Worker
from kvrelay.messages import Peer, WorkerStatus
from kvrelay.types import Incarnation

MAX_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes: to `first`, which pushes its KV to one of `candidates`, or keeps it if there are none."""

    first: Incarnation
    candidates: tuple[Peer, ...] = ()

    @property
    def local(self) -> bool:
        """True when one worker does everything."""
        return not self.candidates

    @property
    def workers(self) -> tuple[Incarnation, ...]:
        """Every worker that may come to hold a part of the request, each once."""
        return tuple(dict.fromkeys((self.first, *(peer.incarnation for peer in self.candidates))))

    def avoiding(self, worker: Incarnation) -> "Route":
        """The same, with this candidate as the last resort."""
        return Route(self.first, tuple(sorted(self.candidates, key=lambda peer: peer.incarnation == worker)))


@dataclass(slots=True)
class Sent:
    """What this gateway has at one worker: prompt tokens not known to be computed, sequences to be decoded."""

    prompt_tokens: int = 0
    sequences: int = 0


class Router:
    """Keeps count of what is where, and chooses."""

    def __init__(self) -> None:
        """Nothing was sent yet."""
        self._own: defaultdict[Incarnation, Sent] = defaultdict(Sent)
        self._others: dict[Incarnation, Sent] = {}
        self._turn = 0

    def choose(self, cluster: Cluster, num_prompt_tokens: int, *, param: str | None = None) -> Route:
        """The least loaded prefill worker with the least loaded decode workers for it; workers that do both serve
        where there is no such pair. Equals take turns. `param` is the user's name for the prompt, for errors.

        Raises:
            NoWorkers: none can be used; the text says why.
            ContextLengthExceeded: the prompt leaves no room for a token at any of them; names both numbers.
        """
        if not cluster.ready:
            raise NoWorkers(cluster.why_not_ready, retry_after_s=1.0)
        check_prompt_fits(num_prompt_tokens, cluster.max_model_len, param=param)
        self._turn += 1
        pairs = {
            worker.incarnation: (worker, fitting)
            for worker, peers in cluster.pairs()
            if _fits(worker, num_prompt_tokens)
            and (fitting := [peer for peer in peers if _fits(peer, num_prompt_tokens)])
        }
        if not pairs:
            alone = [worker for worker in cluster.colocated() if _fits(worker, num_prompt_tokens)]
            return Route(self._by_load(alone)[0].incarnation)
        first = min(self._rotated(worker for worker, _ in pairs.values()), key=self._prompt_load)
        candidates = self._by_load(pairs[first.incarnation][1])[:MAX_CANDIDATES]
        return Route(first.incarnation, tuple(worker.peer for worker in candidates))

    def add(self, worker: Incarnation, *, prompt_tokens: int = 0, sequences: int = 0) -> None:
        """Counts what was sent to a worker; negative numbers when it is done."""
        sent = self._own[worker]
        sent.prompt_tokens += prompt_tokens
        sent.sequences += sequences
        if not (sent.prompt_tokens or sent.sequences):
            del self._own[worker]

    def own(self, worker: Incarnation) -> Sent:
        """What this gateway has at a worker."""
        return self._own.get(worker, Sent())

    @property
    def idle(self) -> bool:
        """True when nothing is counted anywhere."""
        return not self._own

    def on_status(self, status: WorkerStatus) -> None:
        """What a worker reports beyond our own is other gateways' work. What it does not know yet counts as ours."""
        own, load = self.own(status.source), status.load
        self._others[status.source] = Sent(
            max(0, load.num_waiting_tokens - own.prompt_tokens),
            max(0, load.num_waiting + load.num_running + load.num_offers - own.sequences),
        )

    def on_lost(self, worker: Incarnation) -> None:
        """A worker is gone; what this gateway sent to it is taken back as its requests end."""
        self._others.pop(worker, None)

    def _by_load(self, workers: Iterable[Worker]) -> list[Worker]:
        return sorted(self._rotated(workers), key=self._decode_load)

    def _rotated(self, workers: Iterable[Worker]) -> list[Worker]:
        listed = list(workers)
        start = self._turn % max(1, len(listed))
        return listed[start:] + listed[:start]

    def _prompt_load(self, worker: Worker) -> int:
        return self.own(worker.incarnation).prompt_tokens + self._other(worker).prompt_tokens

    def _decode_load(self, worker: Worker) -> tuple[float, int]:
        sequences = self.own(worker.incarnation).sequences + self._other(worker).sequences
        return sequences / worker.hello.max_num_seqs, self._prompt_load(worker)

    def _other(self, worker: Worker) -> Sent:
        return self._others.get(worker.incarnation, Sent())


def check_prompt_fits(
    num_prompt_tokens: int, max_model_len: int, *, param: str | None = None, at_least: bool = False
) -> None:
    """Raises ContextLengthExceeded unless a prompt leaves room for one token. `at_least`: the number is a bound."""
    if num_prompt_tokens + 1 > max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {'at least ' if at_least else ''}{num_prompt_tokens} tokens, but the context of "
            f"{max_model_len} tokens must hold it and at least one generated token; shorten the prompt.",
            param=param,
        )


def _fits(worker: Worker, num_prompt_tokens: int) -> bool:
    return num_prompt_tokens + 1 <= worker.hello.max_model_len
