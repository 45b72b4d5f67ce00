"""Decode scheduling under random arrivals, hand-overs, grants and aborts, at any moment, with few blocks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.decode.scheduler import DecodeScheduler
from kvrelay.errors import Overloaded
from kvrelay.prefixes import Prefixes
from kvrelay.types import Batch, RequestKey, Sequence, SequenceStatus
from tests.fake_runner import (
    EOS,
    FakeRunner,
    check_batch,
    check_ledger,
    check_passed_over,
    make_sequence,
    next_token,
    undisturbed,
)

BLOCK_SIZE = 4
MAX_MODEL_LEN = 22
LIVE = (SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.PREEMPTED)
SIZES = st.integers(1, 10) | st.integers(1, MAX_MODEL_LEN - 1)
MAX_TOKENS = st.integers(2, 30)
USUALLY = st.sampled_from((True, True, True, False))


class DecodeMachine(RuleBasedStateMachine):
    """Drives one scheduler and plays the receiver, whose grants come and go beside it."""

    @initialize(
        num_blocks=st.integers(6, 10),
        max_batch_tokens=st.integers(1, 10),
        max_num_seqs=st.integers(1, 5),
        model=st.sampled_from(("model", "model", None)),
    )
    def begin(self, num_blocks: int, max_batch_tokens: int, max_num_seqs: int, model: str | None) -> None:
        self.limits = (max_batch_tokens, max_num_seqs)
        self.runner = FakeRunner(BLOCK_SIZE)
        self.blocks = self.runner.new_blocks(num_blocks)
        self.prefixes = Prefixes(self.blocks, model)
        self.scheduler = DecodeScheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_queue=5,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            prefixes=self.prefixes,
        )
        self.sequences: list[Sequence] = []
        self.tokens: dict[Sequence, list[int]] = {}
        self.granted: list[Sequence] = []
        self.batch = Batch()
        self.num_made = 0

    def having(self, *statuses: SequenceStatus) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status in statuses]

    def new(self, size: int, max_tokens: int, ignore_eos: bool, attempt: int) -> Sequence:
        """Two of five have prompts of their own, the others share one; one of those has another salt."""
        self.num_made += 1
        return make_sequence(
            f"r{self.num_made}",
            size,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            attempt=attempt,
            prompt="shared" if self.num_made % 5 > 1 else "",
            salt="salt" if self.num_made % 5 == 2 else "",
        )

    @rule(size=SIZES, max_tokens=st.just(1) | MAX_TOKENS, ignore_eos=USUALLY, attempt=st.integers(0, 1))
    def add(self, size: int, max_tokens: int, ignore_eos: bool, attempt: int) -> None:
        sequence = self.new(size, max_tokens, ignore_eos, attempt)
        try:
            self.scheduler.add(sequence)
        except Overloaded:
            assert len(self.having(SequenceStatus.WAITING, SequenceStatus.PREEMPTED)) >= 5
        else:
            self.sequences.append(sequence)
            self.tokens[sequence] = []

    @rule(size=SIZES, max_tokens=MAX_TOKENS, ignore_eos=USUALLY, commit=USUALLY)
    def grant(self, size: int, max_tokens: int, ignore_eos: bool, commit: bool) -> None:
        room, seats = self.scheduler.grant_allowance()
        running = len(self.having(SequenceStatus.RUNNING))
        assert (room, seats) == (0, 0) or not self.having(SequenceStatus.PREEMPTED)
        assert room == 0 or room + running <= self.blocks.num_free
        need = self.blocks.blocks_for(size)
        leased = sum(len(sequence.block_table) for sequence in self.granted)
        small = leased + need <= 0.3 * self.blocks.num_blocks or not self.granted
        if need <= room and len(self.granted) < seats and small:
            self.granted.append(self.hand_over(self.new(size, max_tokens, ignore_eos, attempt=0)))
            if commit:
                self.commit(self.granted.pop())

    def hand_over(self, sequence: Sequence) -> Sequence:
        """Blocks for a prompt; those that are not held already are written as pieces come."""
        size = sequence.num_prompt_tokens
        held = self.blocks.match(self.prefixes.extend([], sequence.token_ids, sequence.cache_salt))
        sequence.block_table = held + self.blocks.allocate(self.blocks.blocks_for(size) - len(held))
        self.runner.write(sequence, len(held) * BLOCK_SIZE, size)
        return sequence

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), commit=USUALLY)
    def end_grant(self, data: st.DataObject, commit: bool) -> None:
        sequence = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        if commit:
            self.commit(sequence)
        else:
            self.blocks.release(sequence.block_table)

    def commit(self, sequence: Sequence) -> None:
        sequence.num_computed_tokens = sequence.num_prompt_tokens
        self.prefixes.publish(sequence, sequence.num_prompt_tokens)
        sequence.token_ids.append(next_token(sequence.token_ids))
        self.scheduler.adopt(sequence)
        self.sequences.append(sequence)
        self.tokens[sequence] = sequence.token_ids[-1:]

    @precondition(lambda self: len(self.having(*LIVE)) > 2)
    @rule(data=st.data(), attempt=st.integers(0, 1))
    def abort(self, data: st.DataObject, attempt: int) -> None:
        key = RequestKey(data.draw(st.sampled_from(self.having(*LIVE))).key.request_id, attempt)
        hit = {sequence for sequence in self.having(*LIVE) if key.covers(sequence.key)}
        assert set(self.scheduler.abort(key)) == hit

    @precondition(lambda self: not self.batch and self.scheduler.has_work)
    @rule()
    def schedule(self) -> None:
        waiting, running = self.having(SequenceStatus.WAITING), self.having(SequenceStatus.RUNNING)
        self.batch = self.scheduler.schedule()
        check_batch(self.batch, BLOCK_SIZE, *self.limits)
        self.check_preemption(running)
        started = [sequence for sequence in waiting if sequence.status is SequenceStatus.RUNNING]
        check_passed_over(self.blocks, self.prefixes, waiting)
        assert not started or not self.having(SequenceStatus.PREEMPTED)  # those resume first
        self.check_progress()

    def check_preemption(self, running: list[Sequence]) -> None:
        """Whoever lost its blocks came after everyone who has some, and that only when no block was left."""
        lost = [sequence.arrival for sequence in running if sequence.status is SequenceStatus.PREEMPTED]
        kept = [sequence.arrival for sequence in self.having(SequenceStatus.RUNNING)]
        assert not lost or max(kept) < min(lost)

    def check_progress(self) -> None:
        """The oldest that has blocks moves, and somebody always has; only grants may keep it waiting."""
        running = self.having(SequenceStatus.RUNNING)
        oldest = min(running, key=lambda sequence: sequence.arrival, default=None)
        moves = oldest in [item.sequence for item in self.batch.scheduled]
        assert moves or self.granted or not self.having(*LIVE)

    @precondition(lambda self: self.batch)
    @rule()
    def compute(self) -> None:
        expected = [
            item.sequence
            for item in self.batch.scheduled
            if item.samples and item.sequence.status is not SequenceStatus.ABORTED
        ]
        new = self.scheduler.complete(self.batch, self.runner.run(self.batch))
        self.batch = Batch()
        assert [token.sequence for token in new] == expected
        for token in new:
            told = self.tokens[token.sequence]
            assert (token.sample, token.index) == (0, len(told))
            told.append(token.token_id)
            assert (token.finish_reason is None) == (token.sequence.status is SequenceStatus.RUNNING)
            if token.finish_reason:
                assert (told, token.finish_reason) == undisturbed(token.sequence, MAX_MODEL_LEN)

    @rule(sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4), local=st.integers(0, 3))
    def burst(self, sizes: list[int], local: int) -> None:
        """Several arrivals at once that will outgrow the blocks; the `local`th is computed here."""
        for index, size in enumerate(sizes):
            if index == local:
                self.add(2 * size, 30, True, attempt=0)
            else:
                self.grant(size, 30, True, commit=True)

    @precondition(lambda self: self.batch or self.scheduler.has_work)
    @rule(count=st.integers(2, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if not self.batch:
                self.schedule()
            self.compute()

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        check_ledger(self.blocks, self.sequences, self.granted)

    @invariant()
    def load_is_what_is_there(self) -> None:
        load = self.scheduler.load
        assert self.scheduler.has_work == bool(load.num_running + load.num_waiting)
        assert load.num_waiting == len(self.having(SequenceStatus.WAITING, SequenceStatus.PREEMPTED))

    def teardown(self) -> None:
        """No more arrivals: everything ends, in a bounded number of steps, with the tokens it would have got alone."""
        if not hasattr(self, "sequences"):
            return
        while self.granted:
            self.blocks.release(self.granted.pop().block_table)
        steps_left = 2 + 2 * MAX_MODEL_LEN * len(self.having(*LIVE))
        while self.batch or self.scheduler.has_work:
            assert steps_left
            steps_left -= 1
            self.steps(1)
        assert self.blocks.ledger.leased == 0
        for sequence in self.having(SequenceStatus.FINISHED):
            assert self.tokens[sequence] == undisturbed(sequence, MAX_MODEL_LEN)[0]
        assert not self.having(*LIVE)


TestDecode = DecodeMachine.TestCase
TestDecode.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
