"""Hand-overs over a network that does, at random but seeded, everything wrong that a network can do.

The workers live, and their connections too: what a message needs to be made up for is the protocol's own business.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.transfer.network import PIECE, Flight, Network
from tests.transfer.world import World

FAULTS = ("drop", "flip", "truncate", "repeat", "delay", "reorder")
KINDS = (
    PIECE,
    "kv_offer",
    "kv_grant",
    "kv_refusal",
    "kv_commit",
    "kv_repair",
    "kv_ack",
    "kv_reject",
    "kv_released",
    "abort",
)
OFTEN = {PIECE: 0.12, "kv_offer": 0.2, "kv_grant": 0.25, "kv_commit": 0.25, "kv_ack": 0.3}  # the others are rare
NUM_TOKENS = (1, 2, 3, 4, 5, 7, 9, 16, 31)  # the last is more than a receiver takes
WEIGHTS = (4, 4, 4, 4, 4, 4, 4, 4, 1)
DELAYS_S = (0.3, 0.3, 0.3, 1.0, 1.0, 3.0, 12.0)  # the longest outlives a lease
PER_ROUND = 20


class BadNetwork(Network):
    """Lets nothing pass without a thought of doing something to it. `injected` counts by kind and fault."""

    def __init__(self, seed: str) -> None:
        super().__init__()
        self.injected: Counter[tuple[str, str]] = Counter()
        self._random = random.Random(seed)
        self._slow: Flight | None = None  # what goes next to the same process overtakes it

    def put(self, flight: Flight) -> None:
        """It goes out, and maybe something happens to it."""
        super().put(flight)
        if self._slow is not None and self._slow.to == flight.to:
            self._overtake(len(self) - 1, self._slow)
            self._slow = None
        elif self._random.random() < OFTEN.get(flight.kind, 0.6):
            self._inject(self._random.choice(FAULTS), len(self) - 1)

    def _reorder(self, index: int) -> None:
        """It overtakes something that goes to the same process, or will be overtaken."""
        ahead = [place for place in range(index) if self[place].to == self[index].to]
        if ahead:
            self.injected[self[index].kind, "reorder"] += 1
            self.move(index, self._random.choice(ahead))
        else:
            self._slow = self[index]

    def _overtake(self, index: int, slow: Flight) -> None:
        place = next((place for place, flight in enumerate(self) if flight is slow), None)
        if place is not None:
            self.injected[slow.kind, "reorder"] += 1
            self.move(index, place)

    def _inject(self, fault: str, index: int) -> None:
        if fault == "reorder":
            self._reorder(index)
            return
        due = self[index].sent_at + self._random.choice(DELAYS_S)
        number = self._random.randrange(2**16)
        self.injected[self[index].kind, fault] += 1
        match fault:
            case "drop":
                self.drop(index)
            case "flip":
                self.flip(index, number)
            case "truncate":
                self.truncate(index, number)
            case "repeat":
                self.repeat(index, due)
            case _:
                self.delay(index, due)


@dataclass
class Report:
    """What many rounds came to."""

    injected: Counter[tuple[str, str]] = field(default_factory=Counter)
    log: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0


class Round:
    """A few hand-overs that get into each other's way. The same seed does the same."""

    def __init__(self, seed: int, *, one_sided: bool) -> None:
        self._random = random.Random(f"round {seed}")
        self.network = BadNetwork(f"network {seed}")
        self.world = World(one_sided=one_sided, network=self.network)

    def run(self) -> None:
        """Asks for everything, a little at a time; then all of it must come to an end."""
        asked = 0
        while asked < PER_ROUND:
            while asked < PER_ROUND and self._random.random() < 0.4:
                asked += self._ask()
            self._step()
        while self.world.network or self.world.open:
            assert self.world.now < 1000, f"{sorted(self.world.open)} hang"
            self._step()
        self.world.settle()

    def _ask(self) -> bool:
        num_tokens = self._random.choices(NUM_TOKENS, WEIGHTS)[0]
        return self.world.request(self._random.randrange(2), num_tokens, self._random.randrange(2)) is not None

    def _step(self) -> None:
        """What workers do, with less room than is asked for, and now and then a client that goes away."""
        for index in range(2):
            self.world.compute(index)
            self.world.push(index, self._random.choice((16, 64, 1000)))
            self.world.grant(index, max_sequences=self._random.choice((0, 1, 2)))
        self.world.arrive()
        self.world.check()
        self.world.wait(self._random.choice((0.1, 0.2, 0.4)))
        for index in range(2):
            self.world.finish(index)
        if self.world.open and self._random.random() < 0.04:
            self._give_up(self._random.choice(sorted(self.world.open)))
        self.world.check()

    def _give_up(self, request_id: str) -> None:
        if self._random.random() < 0.4:
            self.world.abort(request_id)
        else:
            num_tokens = self._random.choices(NUM_TOKENS, WEIGHTS)[0]
            self.world.retry(request_id, self._random.randrange(2), num_tokens, self._random.randrange(2))


def inject(num_handovers: int, first_seed: int, *, one_sided: bool) -> Report:
    """Rounds from this seed on.

    Raises:
        AssertionError: something that must always hold did not; it names the seed.
    """
    report = Report()
    for seed in range(first_seed, first_seed + num_handovers // PER_ROUND):
        this = Round(seed, one_sided=one_sided)
        try:
            this.run()
        except Exception as error:
            raise AssertionError(f"Round(seed={seed}, one_sided={one_sided}): {error!r}") from error
        report.injected += this.network.injected
        report.log += this.world.log
        report.num_requests += len(this.world.fates.endings)
    return report
