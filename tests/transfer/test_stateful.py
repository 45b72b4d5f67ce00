"""Random histories of the whole hand-over: Hypothesis chooses what happens, the world checks what must hold."""

import os
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.transfer.world import World

EITHER = st.integers(0, 1)
NUM_TOKENS = st.sampled_from([1, 2, 3, 4, 5, 7, 9, 16])


# Shrinking a history takes minutes; set KVRELAY_SHRINK to have it while hunting a failure.
PHASES = [phase for phase in Phase if phase is not Phase.shrink or "KVRELAY_SHRINK" in os.environ]


class HandOverMachine(RuleBasedStateMachine):
    """One history."""

    one_sided: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.world = World(one_sided=self.one_sided)

    @rule(prefill=EITHER, num_tokens=NUM_TOKENS, first_choice=EITHER)
    def request(self, prefill: int, num_tokens: int, first_choice: int) -> None:
        self.world.request(prefill, num_tokens, first_choice)

    @rule(times=st.integers(1, 6))
    def work(self, times: int) -> None:
        for _ in range(times):
            self.world.work()
            self.world.check()

    @rule(prefill=EITHER, layers=st.integers(1, 4))
    def compute(self, prefill: int, layers: int) -> None:
        for _ in range(layers):
            self.world.compute(prefill)

    @rule(prefill=EITHER, max_bytes=st.sampled_from([1, 16, 40, 1000]))
    def push(self, prefill: int, max_bytes: int) -> None:
        self.world.push(prefill, max_bytes)

    @rule(decode=EITHER, max_blocks=st.sampled_from([2, 5, 20]), max_sequences=st.integers(0, 2))
    def grant(self, decode: int, max_blocks: int, max_sequences: int) -> None:
        self.world.grant(decode, max_blocks, max_sequences)

    @rule(decode=EITHER)
    def finish(self, decode: int) -> None:
        self.world.finish(decode)

    @precondition(lambda self: self.world.network)
    @rule(where=st.lists(st.integers(0, 2**16), min_size=1, max_size=6), keep=st.booleans())
    def deliver(self, where: list[int], keep: bool) -> None:
        for place in where:
            if self.world.network:
                self.world.deliver(place % len(self.world.network), keep=keep)

    @precondition(lambda self: self.world.network)
    @rule(where=st.integers(0, 2**16))
    def lose(self, where: int) -> None:
        self.world.network.drop(where % len(self.world.network))

    @precondition(lambda self: self.world.network)
    @rule(where=st.integers(0, 2**16), bit=st.integers(0, 2**16))
    def flip(self, where: int, bit: int) -> None:
        self.world.network.flip(where % len(self.world.network), bit)

    @precondition(lambda self: self.world.network)
    @rule(where=st.integers(0, 2**16), length=st.integers(0, 2**16))
    def truncate(self, where: int, length: int) -> None:
        self.world.network.truncate(where % len(self.world.network), length)

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.5, 2.0, 9.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @precondition(lambda self: self.world.open)
    @rule(which=st.integers(0, 2**16))
    def abort(self, which: int) -> None:
        requests = sorted(self.world.open)
        self.world.abort(requests[which % len(requests)])

    @precondition(lambda self: self.world.open)
    @rule(which=st.integers(0, 2**16), prefill=EITHER, num_tokens=NUM_TOKENS, first_choice=EITHER)
    def retry(self, which: int, prefill: int, num_tokens: int, first_choice: int) -> None:
        requests = sorted(self.world.open)
        self.world.retry(requests[which % len(requests)], prefill, num_tokens, first_choice)

    @rule(prefill=EITHER)
    def end_at_first_token(self, prefill: int) -> None:
        self.world.prefills[prefill].mayfly = True

    @rule(prefill=EITHER)
    def restart_prefill(self, prefill: int) -> None:
        self.world.restart_prefill(prefill)

    @rule(decode=EITHER, noticed=st.booleans())
    def restart_decode(self, decode: int, noticed: bool) -> None:
        self.world.restart_decode(decode, noticed=noticed)

    @rule(prefill=EITHER, decode=EITHER, sender_notices=st.booleans())
    def break_connection(self, prefill: int, decode: int, sender_notices: bool) -> None:
        self.world.break_connection(prefill, decode, sender_notices=sender_notices)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()


class OneSidedMachine(HandOverMachine):
    """The same where senders write into granted blocks by themselves."""

    one_sided = True


MACHINES = pytest.mark.parametrize("machine", [HandOverMachine, OneSidedMachine])


def run(machine: type[HandOverMachine], num_histories: int, *, derandomize: bool) -> None:
    chosen = settings(
        max_examples=num_histories,
        stateful_step_count=40,
        deadline=None,
        derandomize=derandomize,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)


@MACHINES
def test_any_history_keeps_every_promise(machine: type[HandOverMachine]) -> None:
    run(machine, 100, derandomize=True)


@pytest.mark.soak
@MACHINES
def test_thousands_of_histories_keep_every_promise(machine: type[HandOverMachine]) -> None:
    run(machine, 2_000, derandomize=False)


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_quiet_world_hands_everything_over(one_sided: bool) -> None:
    world = World(one_sided=one_sided)
    for number in range(40):
        world.request(number % 2, 1 + number % 9, number // 2 % 2)
        for _ in range(8):
            world.work()
            world.wait(0.1)
            world.check()
        world.finish(number % 2)
    world.settle()
    assert world.log["adopted"] == world.log["handed over"] == world.log["ended: finished"] == len(world.fates.endings)
    assert world.log["adopted"] >= 30
    assert world.log["found by prefill"] > 30
    assert world.log["found by decode"] > 30
