"""Decode scheduling, rule by rule."""

import pytest

from kvrelay.blocks import BlockManager
from kvrelay.decode.scheduler import DecodeScheduler, StepToken
from kvrelay.errors import ContextLengthExceeded, MemoryShortage, Overloaded
from kvrelay.types import Batch, FinishReason, RequestKey, SamplingParams, Sequence, SequenceStatus
from tests.fake_runner import EOS, FakeRunner, make_sequence, next_token, undisturbed

MAX_MODEL_LEN = 32


class Bench:
    """A scheduler with its blocks, a model on paper, and what was generated so far."""

    def __init__(
        self, num_blocks: int = 64, max_batch_tokens: int = 16, max_num_seqs: int = 8, max_queue: int = 16
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size=4)
        self.runner = FakeRunner(block_size=4)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason | None] = {}
        self.scheduler = DecodeScheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_queue=max_queue,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
        )

    def add(self, name: str, num_prompt_tokens: int, *, max_tokens: int = 8) -> Sequence:
        sequence = make_sequence(name, num_prompt_tokens, max_tokens=max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def hand_over(self, name: str, num_prompt_tokens: int, *, max_tokens: int = 8) -> Sequence:
        """What a receiver does: blocks, payload, first token."""
        sequence = make_sequence(name, num_prompt_tokens, max_tokens=max_tokens)
        sequence.block_table = self.blocks.allocate(self.blocks.blocks_for(num_prompt_tokens))
        self.runner.write(sequence, 0, num_prompt_tokens)
        sequence.num_computed_tokens = num_prompt_tokens
        sequence.token_ids.append(next_token(sequence.token_ids))
        return sequence

    def adopt(self, name: str, num_prompt_tokens: int, *, max_tokens: int = 8) -> Sequence:
        sequence = self.hand_over(name, num_prompt_tokens, max_tokens=max_tokens)
        self.scheduler.adopt(sequence)
        self.tokens[name] = sequence.token_ids[num_prompt_tokens:]
        return sequence

    def finish(self, batch: Batch) -> list[StepToken]:
        new = self.scheduler.complete(batch, self.runner.run(batch))
        for token in new:
            name = token.sequence.key.request_id
            assert token.index == len(self.tokens.setdefault(name, []))
            self.tokens[name].append(token.token_id)
            self.reasons[name] = token.finish_reason
        return new

    def step(self) -> dict[str, int]:
        """One step; the tokens computed of each request."""
        batch = self.scheduler.schedule()
        self.finish(batch)
        return {item.sequence.key.request_id: item.num_tokens for item in batch.scheduled}

    def run(self) -> None:
        """Steps until nothing is left."""
        for _ in range(500):
            if not self.scheduler.has_work:
                return
            self.step()
        raise TimeoutError("the scheduler still has work after 500 steps")

    def check(self, *sequences: Sequence) -> None:
        """All of them got the tokens they would have got alone."""
        for sequence in sequences:
            name = sequence.key.request_id
            assert (self.tokens[name], self.reasons[name]) == undisturbed(sequence, MAX_MODEL_LEN)
            assert sequence.status is SequenceStatus.FINISHED
        assert self.blocks.ledger.leased == 0


def test_every_running_sequence_gets_a_token_in_every_step() -> None:
    bench = Bench()
    adopted = [bench.adopt(name, 5) for name in "abc"]
    assert bench.step() == {"a": 1, "b": 1, "c": 1}
    bench.run()
    bench.check(*adopted)


def test_an_adopted_first_token_is_not_told_again() -> None:
    bench = Bench()
    bench.adopt("a", 5)
    batch = bench.scheduler.schedule()
    assert [(token.sample, token.index) for token in bench.finish(batch)] == [(0, 1)]


def test_a_prompt_computed_here_tells_its_first_token_too() -> None:
    bench = Bench()
    local = bench.add("a", 5)
    batch = bench.scheduler.schedule()
    assert [token.index for token in bench.finish(batch)] == [0]
    bench.run()
    bench.check(local)


def test_a_prompt_longer_than_the_chunk_size_finishes_beside_running_ones() -> None:
    bench = Bench(max_batch_tokens=8)
    sequences = [bench.adopt("a", 4), bench.adopt("b", 4), bench.add("long", 14)]
    assert [bench.step() for _ in range(4)] == [
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 2},
        {"a": 1, "b": 1, "long": 1},
    ]
    bench.run()
    bench.check(*sequences)


def test_blocks_are_leased_one_by_one_and_not_for_every_possible_token() -> None:
    """A reservation for every possible token halves throughput."""
    bench = Bench()
    sequence = bench.adopt("a", 4, max_tokens=20)
    leased = []
    for _ in range(9):
        bench.step()
        leased.append(len(sequence.block_table))
    assert leased == [2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_decode_out_of_memory_preempts_the_latest_and_answers_all() -> None:
    """Decode out of memory: no answer. None at all reserved ends in out-of-memory under growth."""
    bench = Bench(num_blocks=8)
    sequences = [bench.adopt(name, 8, max_tokens=16) for name in "abcd"]
    bench.step()
    assert [sequence.status for sequence in sequences] == [SequenceStatus.RUNNING] * 3 + [SequenceStatus.PREEMPTED]
    assert [len(sequence.block_table) for sequence in sequences] == [3, 3, 2, 0]  # the third sits the step out
    assert bench.scheduler.num_preempted == 1
    bench.run()
    bench.check(*sequences)


def test_a_later_prompt_is_preempted_between_its_chunks() -> None:
    bench = Bench(num_blocks=8, max_batch_tokens=4)
    earlier, later = bench.adopt("earlier", 4, max_tokens=16), bench.add("later", 20)
    bench.step()
    grant = bench.blocks.allocate(bench.blocks.num_free)
    while later.status is SequenceStatus.RUNNING:
        bench.step()
    assert (later.status, later.num_generated_tokens) == (SequenceStatus.PREEMPTED, 0)
    bench.blocks.release(grant)
    bench.run()
    bench.check(earlier, later)


def test_a_later_hand_over_is_preempted_for_a_prompt_that_came_earlier_and_started_later() -> None:
    bench = Bench(num_blocks=8)
    earlier, later = bench.add("earlier", 12), bench.adopt("later", 4)
    bench.step()
    grant = bench.blocks.allocate(bench.blocks.num_free)
    bench.step()
    assert (earlier.status, later.status) == (SequenceStatus.RUNNING, SequenceStatus.PREEMPTED)
    bench.blocks.release(grant)
    bench.run()
    bench.check(earlier, later)


def test_a_preempted_sequence_continues_without_gap_or_repeat() -> None:
    bench = Bench(num_blocks=8)
    first, second = bench.adopt("first", 12, max_tokens=16), bench.adopt("second", 13, max_tokens=16)
    statuses = set()
    while bench.scheduler.has_work:
        bench.step()
        statuses.add(second.status)
        if second.status is SequenceStatus.PREEMPTED:
            assert (second.block_table, second.num_computed_tokens) == ([], 0)
    assert SequenceStatus.PREEMPTED in statuses
    bench.check(first, second)


def test_preempted_sequences_resume_before_new_prompts_and_before_grants() -> None:
    bench = Bench(num_blocks=8)
    first, second = bench.adopt("first", 16, max_tokens=12), bench.adopt("second", 16)
    new = bench.add("new", 1)
    bench.step()
    assert second.status is SequenceStatus.PREEMPTED
    while second.status is SequenceStatus.PREEMPTED:
        assert new.status is SequenceStatus.WAITING
        assert bench.scheduler.grant_allowance() == (0, 0)
        bench.step()
    assert first.status is SequenceStatus.FINISHED  # the 5 blocks of 17 tokens come only with its end
    bench.run()
    bench.check(first, second, new)


def test_preempted_sequences_resume_in_order_of_arrival() -> None:
    bench = Bench(num_blocks=9)
    sequences = [bench.adopt("a", 12, max_tokens=12), bench.adopt("b", 16, max_tokens=4)]
    grant = bench.blocks.allocate(1)
    late = bench.hand_over("late", 4)
    bench.step()  # a and b fill their blocks, b is preempted for a
    bench.scheduler.adopt(late)  # granted earlier, committed now
    bench.tokens["late"] = late.token_ids[4:]
    bench.blocks.release(grant)
    sequences.append(late)
    grant = bench.blocks.allocate(bench.blocks.num_free)
    while late.status is not SequenceStatus.PREEMPTED:
        bench.step()
    assert sequences[1].status is SequenceStatus.PREEMPTED
    bench.blocks.release(grant)
    resumed: list[str] = []
    while bench.scheduler.has_work:
        resumed += [name for name in bench.step() if name not in ["a", *resumed]]
    assert resumed == ["b", "late"]
    bench.check(*sequences)


def test_starting_leaves_a_free_block_for_each_running_sequence() -> None:
    bench = Bench(num_blocks=9)
    bench.adopt("a", 7)
    bench.adopt("b", 7)
    new = bench.add("new", 16)  # 4 of 5 blocks would leave 1 for 2
    bench.step()
    assert not new.block_table
    bench.scheduler.abort(RequestKey("b", 0))
    bench.step()
    assert new.block_table


def test_a_single_sequence_of_full_context_fits() -> None:
    bench = Bench(num_blocks=8)
    whole = bench.add("whole", 31, max_tokens=100)
    bench.run()
    bench.check(whole)
    grown = bench.adopt("grown", 2, max_tokens=100)
    bench.run()
    bench.check(grown)


def test_blocks_under_a_grant_make_the_oldest_wait_never_fail() -> None:
    """Allocation retried without end: here one that fails costs nothing and is tried once a step."""
    bench = Bench(num_blocks=8)
    sequence = bench.adopt("a", 16, max_tokens=16)
    grant = bench.blocks.allocate(4)
    assert [bench.step(), bench.step()] == [{}, {}]
    assert bench.scheduler.has_work
    bench.blocks.release(grant)
    bench.run()
    bench.check(sequence)


def test_the_latest_arrival_keeps_its_blocks_when_it_is_the_one_that_lacks_one() -> None:
    bench = Bench(num_blocks=8)
    first, second = bench.adopt("first", 17), bench.adopt("second", 8)
    grant = bench.blocks.allocate(1)
    assert bench.step() == {"first": 1}
    assert (second.status, len(second.block_table)) == (SequenceStatus.RUNNING, 2)
    bench.blocks.release(grant)
    assert bench.step() == {"first": 1, "second": 1}
    bench.run()
    bench.check(first, second)


def test_allowance_leaves_a_block_for_each_running_sequence_and_the_next_prompt() -> None:
    bench = Bench(num_blocks=20, max_num_seqs=8)
    assert bench.scheduler.grant_allowance() == (20, 8)
    bench.adopt("a", 8)
    bench.adopt("b", 8)
    assert bench.scheduler.grant_allowance() == (16 - 2, 8 - 2)
    bench.add("c", 12)
    assert bench.scheduler.grant_allowance() == (16 - 2 - 3, 8 - 2 - 1)


def test_adoptions_beyond_the_seats_wait_for_one_and_starve_nobody() -> None:
    bench = Bench(max_num_seqs=2, max_batch_tokens=4)
    sequences = [bench.add("local", 10), *(bench.adopt(name, 4) for name in "abc")]
    assert bench.step() == {"a": 1, "b": 1}
    bench.run()
    bench.check(*sequences)


def test_a_prompt_that_is_being_computed_keeps_its_seat() -> None:
    bench = Bench(max_num_seqs=2, max_batch_tokens=4)
    local = bench.add("local", 10)
    bench.step()
    sequences = [local, bench.adopt("a", 4), bench.adopt("b", 4)]
    assert bench.step() == {"a": 1, "local": 3}
    bench.run()
    bench.check(*sequences)


def test_a_step_has_no_more_sequences_than_tokens() -> None:
    bench = Bench(max_num_seqs=8, max_batch_tokens=2)
    sequences = [bench.adopt(name, 4) for name in "abc"]
    assert bench.scheduler.grant_allowance()[1] == 0
    assert bench.step() == {"a": 1, "b": 1}
    bench.run()
    bench.check(*sequences)


def test_an_adopted_sequence_that_has_ended_does_not_run() -> None:
    bench = Bench()
    sequence = bench.hand_over("a", 5, max_tokens=1)
    bench.scheduler.adopt(sequence)
    assert (sequence.status, bench.blocks.ledger.leased) == (SequenceStatus.FINISHED, 0)
    assert not bench.scheduler.has_work


@pytest.mark.parametrize("flaw", ["no first token", "prompt not whole", "too few blocks"])
def test_a_hand_over_that_is_not_whole_is_refused(flaw: str) -> None:
    bench = Bench()
    sequence = bench.hand_over("a", 5)
    match flaw:
        case "no first token":
            sequence.token_ids.pop()
        case "prompt not whole":
            sequence.num_computed_tokens = 4
        case "too few blocks":
            bench.blocks.release([sequence.block_table.pop()])
    with pytest.raises(ValueError, match="must bring the whole prompt and the first token"):
        bench.scheduler.adopt(sequence)
    assert not bench.scheduler.has_work


def test_a_sample_ends_at_end_of_sequence_stop_token_max_tokens_or_context() -> None:
    bench = Bench()
    prompt = make_sequence("p", 4).token_ids
    cases = {
        "eos": (SamplingParams(max_tokens=9), EOS, FinishReason.STOP),
        "eos ignored": (SamplingParams(max_tokens=9, ignore_eos=True), EOS, None),
        "stop": (SamplingParams(max_tokens=9, stop_token_ids=(5,)), 5, FinishReason.STOP),
        "max_tokens": (SamplingParams(max_tokens=2), 7, FinishReason.LENGTH),
        "more": (SamplingParams(max_tokens=9), 7, None),
    }
    for name, (params, token, reason) in cases.items():
        blocks = bench.blocks.allocate(1)
        sequence = Sequence(RequestKey(name, 0), 0, 1, params, [*prompt, 9], 4, blocks, 4)
        bench.scheduler.adopt(sequence)
        new = bench.scheduler.complete(bench.scheduler.schedule(), [token])
        assert [item.finish_reason for item in new] == [reason]
        bench.scheduler.abort(sequence.key)
    context = bench.add("context", MAX_MODEL_LEN - 1, max_tokens=9)
    bench.run()
    assert (context.num_generated_tokens, bench.reasons["context"]) == (1, FinishReason.LENGTH)


def test_an_abort_frees_at_once_or_when_the_forward_has_ended() -> None:
    bench = Bench(max_batch_tokens=8)
    computing, chunked, waiting = bench.adopt("a", 4), bench.add("b", 20), bench.add("c", 20)
    batch = bench.scheduler.schedule()
    for sequence in (computing, chunked, waiting):
        assert bench.scheduler.abort(sequence.key) == [sequence]
        assert bench.scheduler.abort(sequence.key) == []
    assert bench.blocks.ledger.leased == 7
    assert bench.finish(batch) == []
    assert (bench.blocks.ledger.leased, bench.scheduler.has_work) == (0, False)


def test_refusals_are_immediate() -> None:
    bench = Bench(max_queue=1)
    with pytest.raises(ContextLengthExceeded, match="32 tokens and the context 32"):
        bench.add("long", MAX_MODEL_LEN)
    bench.add("a", 1)
    with pytest.raises(Overloaded, match="1 requests wait"):
        bench.add("b", 1)


def test_memory_for_less_than_one_context_is_refused_at_start() -> None:
    with pytest.raises(MemoryShortage, match="cannot hold one sequence of 32 tokens"):
        Bench(num_blocks=7)


def test_load_counts_sequences_by_state_and_tokens_to_compute() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.adopt("a", 4)
    bench.add("b", 12)
    bench.add("c", 12)
    bench.step()
    load = bench.scheduler.load
    assert (load.num_waiting, load.num_running, load.num_held, load.num_waiting_tokens) == (1, 2, 0, 17)
    assert bench.scheduler.ledger == bench.blocks.ledger


def test_results_that_do_not_match_the_batch_are_refused() -> None:
    bench = Bench()
    bench.adopt("a", 4)
    batch = bench.scheduler.schedule()
    with pytest.raises(ValueError, match="1 sequences were computed and 0 results"):
        bench.scheduler.complete(batch, [])
    with pytest.raises(RuntimeError, match="call complete"):
        bench.scheduler.schedule()
    assert len(bench.scheduler.complete(batch, [7])) == 1
