"""Prefill scheduling under random arrivals, aborts and releases, at any moment, with few blocks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.errors import ContextLengthExceeded, Overloaded
from kvrelay.prefill.scheduler import PrefillScheduler
from kvrelay.prefixes import Prefixes
from kvrelay.types import Batch, RequestKey, Sequence, SequenceStatus
from tests.fake_runner import FakeRunner, check_batch, check_ledger, check_passed_over, make_sequence, next_token

BLOCK_SIZE = 4
NAMES = "abcdef"


class PrefillMachine(RuleBasedStateMachine):
    """Drives one scheduler; the forward is separate from its planning, so that anything can happen in between."""

    @initialize(
        num_blocks=st.integers(1, 12),
        max_batch_tokens=st.integers(1, 12),
        max_num_seqs=st.integers(1, 4),
        model=st.sampled_from(("model", "model", None)),
    )
    def begin(self, num_blocks: int, max_batch_tokens: int, max_num_seqs: int, model: str | None) -> None:
        self.limits = (max_batch_tokens, max_num_seqs)
        self.runner = FakeRunner(BLOCK_SIZE)
        self.blocks = self.runner.new_blocks(num_blocks)
        self.prefixes = Prefixes(self.blocks, model)
        self.scheduler = PrefillScheduler(
            self.blocks,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            max_queue=5,
            prefixes=self.prefixes,
        )
        self.sequences: list[Sequence] = []
        self.offered: list[Sequence] = []
        self.last_started = 0
        self.batch = Batch()

    def having(self, status: SequenceStatus) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is status]

    @rule(
        name=st.sampled_from(NAMES),
        attempt=st.integers(0, 2),
        size=st.integers(1, 52),
        prompt=st.sampled_from(("", "shared", "shared", "other")),
        salt=st.sampled_from(("", "", "salt")),
    )
    def add(self, name: str, attempt: int, size: int, prompt: str, salt: str) -> None:
        sequence = make_sequence(name, size, attempt=attempt, prompt=prompt, salt=salt)
        try:
            self.scheduler.add(sequence)
        except ContextLengthExceeded:
            assert size > self.blocks.num_blocks * BLOCK_SIZE
        except Overloaded:
            assert len(self.having(SequenceStatus.WAITING)) == 5
        else:
            self.sequences.append(sequence)

    @rule(name=st.sampled_from(NAMES), attempt=st.integers(0, 2))
    def abort(self, name: str, attempt: int) -> None:
        live = {SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.HELD}
        key = RequestKey(name, attempt)
        hit = {sequence for sequence in self.sequences if key.covers(sequence.key) and sequence.status in live}
        assert set(self.scheduler.abort(key)) == hit

    @rule()
    def offer(self) -> None:
        fresh = self.scheduler.to_offer()
        assert not set(fresh) & set(self.offered)
        self.offered += fresh
        if not self.batch:  # then what is offered runs in the very next step
            self.schedule()
            assert all(sequence.status in {SequenceStatus.RUNNING, SequenceStatus.HELD} for sequence in fresh)
            assert {item.sequence for item in self.batch.scheduled} <= set(self.offered)

    @precondition(lambda self: not self.batch)
    @rule()
    def schedule(self) -> None:
        waiting, crowd = self.having(SequenceStatus.WAITING), self.using_blocks()
        self.batch = self.scheduler.schedule()
        check_batch(self.batch, BLOCK_SIZE, *self.limits)
        check_passed_over(self.blocks, self.prefixes, waiting)
        assert self.batch or not waiting or crowd  # an idle worker starts whatever comes first

    @precondition(lambda self: self.batch)
    @rule()
    def compute(self) -> None:
        ends = {item.sequence: item.samples for item in self.batch.scheduled}
        alive = {sequence for sequence in ends if sequence.status is not SequenceStatus.ABORTED}
        done = self.scheduler.complete(self.batch, self.runner.run(self.batch))
        self.batch = Batch()
        assert set(done) == {sequence for sequence in alive if ends[sequence]}
        for sequence in done:
            assert sequence.status is SequenceStatus.HELD
            assert sequence.token_ids[sequence.num_prompt_tokens :] == [next_token(sequence.token_ids[:-1])]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.having(SequenceStatus.HELD)
        if held:
            self.scheduler.release(data.draw(st.sampled_from(held)).key)

    def using_blocks(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.block_table]

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        check_ledger(self.blocks, self.sequences)

    @invariant()
    def what_is_sent_is_what_was_computed(self) -> None:
        for sequence in self.having(SequenceStatus.HELD):
            self.runner.read(sequence, sequence.num_prompt_tokens)

    @invariant()
    def cached_tokens_are_those_of_full_blocks_and_never_all(self) -> None:
        for sequence in self.sequences:
            assert sequence.num_cached_tokens % BLOCK_SIZE == 0
            assert sequence.num_cached_tokens < sequence.num_prompt_tokens

    @invariant()
    def held_ones_have_at_most_half_unless_alone(self) -> None:
        assert self.blocks.ledger.leased <= self.blocks.num_blocks // 2 or len(self.using_blocks()) == 1

    def teardown(self) -> None:
        if not hasattr(self, "sequences"):
            return
        to_do = [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.ABORTED]
        steps_left = 2 + sum(sequence.num_uncomputed_tokens for sequence in to_do)
        while self.batch or self.having(SequenceStatus.WAITING) or self.having(SequenceStatus.RUNNING):
            assert steps_left
            steps_left -= 1
            if not self.batch:
                self.schedule()
            self.compute()
            for sequence in self.having(SequenceStatus.HELD):
                self.scheduler.release(sequence.key)
        for sequence in self.having(SequenceStatus.HELD):
            self.scheduler.release(sequence.key)
        assert self.blocks.ledger.leased == 0
        assert {sequence.status for sequence in self.sequences} <= {SequenceStatus.FINISHED, SequenceStatus.ABORTED}


TestPrefill = PrefillMachine.TestCase
TestPrefill.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
