"""What the gateway knows about the workers: who is there, who can be used, and why the others cannot.

Pure: events in, facts out. `now` is always seconds on the caller's monotonic clock.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from kvrelay.messages import PairStatus, Peer, WorkerHello, WorkerLoad, WorkerStatus
from kvrelay.types import Incarnation, Role

_MAX_REMEMBERED_LOSSES = 16


@dataclass(slots=True, eq=False)
class Worker:
    """One living worker. `heard_s` is when it last said anything, `status` its newest heartbeat."""

    hello: WorkerHello
    heard_s: float
    status: WorkerStatus | None = None

    @property
    def incarnation(self) -> Incarnation:
        """Which process it is."""
        return self.hello.source

    @property
    def role(self) -> Role:
        """What it does."""
        return self.hello.role

    @property
    def draining(self) -> bool:
        """True when it finishes what it has and takes nothing new."""
        return self.status is not None and self.status.draining

    @property
    def load(self) -> WorkerLoad:
        """What it said it has to do; zeros before its first heartbeat."""
        return WorkerLoad() if self.status is None else self.status.load

    @property
    def peer(self) -> Peer:
        """Where other workers reach it."""
        hello = self.hello
        return Peer(
            name=hello.name,
            incarnation=hello.source,
            control_endpoint=hello.control_endpoint,
            data_endpoints=hello.data_endpoints,
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that is gone."""

    incarnation: Incarnation
    name: str
    role: Role
    reason: str
    lost_s: float


class Cluster:
    """The workers of one gateway. A worker is used when it serves the gateway's model, is not draining, and has a
    partner: a prefill worker needs a decode worker that can take its KV, and the other way round."""

    def __init__(self, model: str, fingerprint: str, *, death_s: float) -> None:
        """`model` and `fingerprint` are the gateway's own; silence of `death_s` seconds means death."""
        self.model = model
        self.fingerprint = fingerprint
        self._death_s = death_s
        self._workers: dict[Incarnation, Worker] = {}
        self._losses: deque[Loss] = deque(maxlen=_MAX_REMEMBERED_LOSSES)

    def __contains__(self, incarnation: Incarnation) -> bool:
        return incarnation in self._workers

    @property
    def workers(self) -> list[Worker]:
        """All living workers, in the order in which they came."""
        return list(self._workers.values())

    def get(self, incarnation: Incarnation) -> Worker | None:
        """A living worker, or None."""
        return self._workers.get(incarnation)

    # events

    def on_hello(self, hello: WorkerHello, now: float) -> list[Loss]:
        """A worker came, or introduced itself again. Returns the dead it replaces: who listened at its address."""
        replaced = [
            worker
            for worker in self.workers
            if worker.hello.control_endpoint == hello.control_endpoint and worker.incarnation != hello.source
        ]
        losses = [self._lose(worker, now, "it was restarted") for worker in replaced]
        status = self._workers[hello.source].status if hello.source in self._workers else None
        self._workers[hello.source] = Worker(hello, now, status)
        return losses

    def on_status(self, status: WorkerStatus, now: float) -> bool:
        """A heartbeat. False: the worker is not known and should introduce itself."""
        worker = self._workers.get(status.source)
        if worker is None:
            return False
        worker.status, worker.heard_s = status, now
        return True

    def on_heard(self, incarnation: Incarnation, now: float) -> None:
        """Anything else a worker says shows that it lives."""
        if (worker := self._workers.get(incarnation)) is not None:
            worker.heard_s = now

    def on_lost(self, incarnation: Incarnation, now: float) -> Loss | None:
        """A connection was lost. None: it was not that of a known worker."""
        worker = self._workers.get(incarnation)
        return None if worker is None else self._lose(worker, now, "its connection was lost")

    def tick(self, now: float) -> list[Loss]:
        """Declares the silent dead."""
        silent = [worker for worker in self.workers if now - worker.heard_s > self._death_s]
        return [self._lose(worker, now, f"it was silent for more than {self._death_s:g} s") for worker in silent]

    def _lose(self, worker: Worker, now: float, reason: str) -> Loss:
        del self._workers[worker.incarnation]
        loss = Loss(worker.incarnation, worker.hello.name, worker.role, reason, now)
        self._losses.append(loss)
        return loss

    # facts

    def pairs(self) -> list[tuple[Worker, list[Worker]]]:
        """Every prefill worker that can be used, with the decode workers that can take its KV."""
        decoders = self._fit(Role.DECODE)
        pairs = [
            (worker, [peer for peer in decoders if not _why_apart(worker, peer)]) for worker in self._fit(Role.PREFILL)
        ]
        return [pair for pair in pairs if pair[1]]

    def colocated(self) -> list[Worker]:
        """Workers that can serve a request alone."""
        return self._fit(Role.BOTH)

    @property
    def ready(self) -> bool:
        """True when a request can be served."""
        return bool(self.colocated() or self.pairs())

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and completion together, of the longest request that can be served now; 0 if none can."""
        paired = [
            min(worker.hello.max_model_len, max(peer.hello.max_model_len for peer in peers))
            for worker, peers in self.pairs()
        ]
        return max(paired + [worker.hello.max_model_len for worker in self.colocated()], default=0)

    @property
    def why_not_ready(self) -> str:
        """A sentence, empty when ready."""
        if self.ready:
            return ""
        if not self._workers:
            return "No worker has registered; start a prefill and a decode worker."
        reasons = [_about(worker, self.why_unused(worker)) for worker in self.workers]
        return f"No worker can serve yet. {' '.join(reasons)}"

    def why_unused(self, worker: Worker) -> str:
        """A sentence that says why a worker gets no requests; empty when it gets some."""
        if own := self._own_problem(worker):
            return own
        if worker.role is Role.BOTH:
            return ""
        partner = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
        partners = self._fit(partner)
        if not partners:
            return f"It waits for a {partner} worker."
        faults = [_why_apart(*_pair(worker, other)) for other in partners]
        return "" if "" in faults else f"It fits no {partner} worker. {faults[0]}"

    def labels(self) -> list[tuple[Worker, str]]:
        """Every worker with a name that is its own: two containers may well give their workers the same."""
        named = Counter(worker.hello.name for worker in self.workers)
        return [(worker, _label(worker, unique=named[worker.hello.name] == 1)) for worker in self.workers]

    def census(self) -> dict[tuple[Role, bool], int]:
        """How many workers there are of each role, apart by whether they can be used."""
        counts = {(role, usable): 0 for role in Role for usable in (True, False)}
        for worker in self.workers:
            counts[worker.role, not self.why_unused(worker)] += 1
        return counts

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything above as JSON values, for `/cluster`."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "ready": self.ready,
            "reason": self.why_not_ready,
            "max_model_len": self.max_model_len,
            "workers": [self._describe(worker, now) for worker in self.workers],
            "lost": [
                {"name": loss.name, "role": loss.role, "reason": loss.reason, "ago_s": now - loss.lost_s}
                for loss in self._losses
            ],
        }

    def _fit(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.role is role and not self._own_problem(worker)]

    def _own_problem(self, worker: Worker) -> str:
        if worker.hello.fingerprint != self.fingerprint:
            return (
                f"It serves {worker.hello.model} ({worker.hello.fingerprint[:12]}), but this gateway serves "
                f"{self.model} ({self.fingerprint[:12]}); start both with the same --model."
            )
        return "It is draining." if worker.draining else ""

    def _describe(self, worker: Worker, now: float) -> dict[str, Any]:
        hello, status, why = worker.hello, worker.status, self.why_unused(worker)
        return {
            **hello.model_dump(mode="json", exclude={"kind", "source", "target", "data_endpoints"}),
            "transports": list(hello.data_endpoints),  # without their addresses, which may hold secrets
            "incarnation": f"{hello.source:016x}",
            "usable": not why,
            "reason": why,
            "draining": worker.draining,
            "heartbeat_age_s": now - worker.heard_s,
            "ledger": status and {**status.ledger.model_dump(), "conserved": status.ledger.conserved},
            "load": worker.load.model_dump(),
            "counters": dict(status.counters) if status else {},
            "pairs": [self._describe_pair(pair) for pair in (status.pairs if status else ())],
        }

    def _describe_pair(self, pair: PairStatus) -> dict[str, Any]:
        receiver = self._workers.get(pair.receiver)
        name = "" if receiver is None else receiver.hello.name
        return {**pair.model_dump(mode="json"), "receiver": f"{pair.receiver:016x}", "receiver_name": name}


def _pair(worker: Worker, other: Worker) -> tuple[Worker, Worker]:
    """Sender and receiver of KV."""
    return (worker, other) if worker.role is Role.PREFILL else (other, worker)


def _why_apart(sender: Worker, receiver: Worker) -> str:
    """Why no KV can go from one to the other, as a sentence; empty if it can."""
    if fault := receiver.hello.layout.why_not_from(sender.hello.layout):
        return fault
    if sender.hello.weights != receiver.hello.weights:
        return (
            f"The sender computes with weights in {sender.hello.weights}, the receiver in {receiver.hello.weights}; "
            "start both with the same --quantization and --kernels."
        )
    ours, theirs = sender.hello.data_endpoints, receiver.hello.data_endpoints
    common = set(ours) & set(theirs)
    if not common:
        return (
            f"The sender has transport {' and '.join(ours)}, the receiver {' and '.join(theirs)}: none in common; "
            "start both with the same --transport, or with auto."
        )
    if common == {"shm"} and sender.hello.layout != receiver.hello.layout:
        return (
            f"Blocks of {sender.hello.layout.block_size} tokens cannot be written into memory that is shared in blocks "
            f"of {receiver.hello.layout.block_size}; start both with the same --block-size, or with --transport auto."
        )
    return ""


def _about(worker: Worker, reason: str) -> str:
    """A sentence that begins with "It" or "Its", with the worker's name instead."""
    name = worker.hello.name
    return f"{name}'s {reason.removeprefix('Its ')}" if reason.startswith("Its ") else name + reason.removeprefix("It")


def _label(worker: Worker, *, unique: bool) -> str:
    return worker.hello.name if unique else f"{worker.hello.name}@{worker.incarnation:016x}"
