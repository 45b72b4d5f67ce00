"""Random histories in which most requests get far: what happens is drawn by weight, in one of three moods.

Hypothesis (test_stateful.py) is better at strange short histories and at making them small; this one is better at deep
ones, where a fault needs a grant, pieces and a commit to be there first.
"""

import random
from collections.abc import Callable

import pytest

from tests.transfer.world import World

NUM_TOKENS = (1, 2, 3, 4, 5, 7, 9, 16)
NUM_STEPS = 80
ORDERLY = {"request": 12, "work": 23, "compute": 7, "push": 8, "grant": 6, "finish": 4, "deliver": 15, "wait": 5}
GATEWAY = {"abort": 3, "retry": 2, "mayfly": 1}
FAULTS = {"lose": 4, "flip": 4, "truncate": 1, "restart_prefill": 2, "restart_decode": 2, "break_connection": 3}
MOODS = {
    "gentle": ORDERLY | GATEWAY,
    "rough": ORDERLY | GATEWAY | FAULTS,
    "chaotic": ORDERLY | GATEWAY | FAULTS | {"work": 1, "deliver": 40, "retry": 6},
}


class History:
    """One seeded history."""

    def __init__(self, seed: int, mood: str, *, one_sided: bool) -> None:
        self.world = World(one_sided=one_sided)
        self._mood = mood
        self._random = random.Random(seed)

    def run(self) -> None:
        """Something happens, again and again; then everything must come to rest."""
        weights = MOODS[self._mood]
        for name in self._random.choices(list(weights), list(weights.values()), k=NUM_STEPS):
            step: Callable[[], None] = getattr(self, name)
            step()
            self.world.check()
        self.world.settle()

    def _one(self) -> int:
        return self._random.randrange(2)

    def request(self) -> None:
        self.world.request(self._one(), self._random.choice(NUM_TOKENS), self._one())

    def work(self) -> None:
        self.world.work()

    def compute(self) -> None:
        self.world.compute(self._one())

    def push(self) -> None:
        self.world.push(self._one(), self._random.choice((1, 16, 40, 1000)))

    def grant(self) -> None:
        self.world.grant(self._one(), self._random.choice((2, 5, 20)), self._random.randrange(3))

    def finish(self) -> None:
        self.world.finish(self._one())

    def deliver(self) -> None:
        for _ in range(self._random.randrange(1, 6)):
            if self.world.network:
                place = self._random.randrange(len(self.world.network))
                self.world.deliver(place, keep=self._random.random() < 0.2)

    def wait(self) -> None:
        self.world.wait(self._random.choice((0.1, 0.3, 0.5) if self._mood == "gentle" else (0.1, 0.3, 0.5, 2, 9, 11)))

    def abort(self) -> None:
        if self.world.open:
            self.world.abort(self._random.choice(sorted(self.world.open)))

    def retry(self) -> None:
        if self.world.open:
            request_id = self._random.choice(sorted(self.world.open))
            self.world.retry(request_id, self._one(), self._random.choice(NUM_TOKENS), self._one())

    def mayfly(self) -> None:
        self.world.prefills[self._one()].mayfly = True

    def lose(self) -> None:
        if self.world.network:
            self.world.network.drop(self._random.randrange(len(self.world.network)))

    def flip(self) -> None:
        """Mostly of a piece, whose damage has to be made good."""
        pieces = [place for place, flight in enumerate(self.world.network) if flight.is_piece]
        if places := pieces if self._random.random() < 0.8 else range(len(self.world.network)):
            self.world.network.flip(self._random.choice(places), self._random.randrange(2**16))

    def truncate(self) -> None:
        if self.world.network:
            place = self._random.randrange(len(self.world.network))
            self.world.network.truncate(place, self._random.randrange(2**16))

    def restart_prefill(self) -> None:
        self.world.restart_prefill(self._one())

    def restart_decode(self) -> None:
        self.world.restart_decode(self._one(), noticed=self._random.random() < 0.5)

    def break_connection(self) -> None:
        self.world.break_connection(self._one(), self._one(), sender_notices=self._random.random() < 0.5)


def run_many(seeds: range, mood: str, *, one_sided: bool) -> int:
    """Runs them all; how many sequences were adopted."""
    num_adopted = 0
    for seed in seeds:
        history = History(seed, mood, one_sided=one_sided)
        try:
            history.run()
        except AssertionError as error:
            raise AssertionError(f"Seed {seed}, mood {mood}, one_sided {one_sided}: {error}") from error
        num_adopted += history.world.log["adopted"]
    return num_adopted


@pytest.mark.parametrize("one_sided", [False, True], ids=["two_sided", "one_sided"])
@pytest.mark.parametrize("mood", list(MOODS))
def test_histories_keep_every_promise(mood: str, one_sided: bool) -> None:
    assert run_many(range(250), mood, one_sided=one_sided) > 250


@pytest.mark.soak
@pytest.mark.parametrize("one_sided", [False, True], ids=["two_sided", "one_sided"])
@pytest.mark.parametrize("mood", list(MOODS))
def test_thousands_of_histories_keep_every_promise(mood: str, one_sided: bool) -> None:
    assert run_many(range(1_000, 6_000), mood, one_sided=one_sided) > 5_000
