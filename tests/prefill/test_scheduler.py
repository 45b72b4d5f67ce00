"""Prefill scheduling, rule by rule."""

import pytest

from kvrelay.blocks import BlockManager
from kvrelay.errors import ContextLengthExceeded, Overloaded
from kvrelay.prefill.scheduler import PrefillScheduler
from kvrelay.types import Batch, RequestKey, Sequence, SequenceStatus
from tests.fake_runner import FakeRunner, make_sequence


class Bench:
    """A scheduler with its blocks and a model on paper."""

    def __init__(self, num_blocks: int = 64, max_batch_tokens: int = 8, max_num_seqs: int = 8, max_queue: int = 16):
        self.blocks = BlockManager(num_blocks, block_size=4)
        self.runner = FakeRunner(block_size=4)
        self.scheduler = PrefillScheduler(
            self.blocks, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, max_queue=max_queue
        )

    def add(self, name: str, num_prompt_tokens: int, attempt: int = 0) -> Sequence:
        sequence = make_sequence(name, num_prompt_tokens, attempt=attempt)
        self.scheduler.add(sequence)
        return sequence

    def finish(self, batch: Batch) -> list[Sequence]:
        return self.scheduler.complete(batch, self.runner.run(batch))

    def step(self) -> dict[str, int]:
        """One step; the tokens computed of each request."""
        batch = self.scheduler.schedule()
        self.finish(batch)
        return {item.sequence.key.request_id: item.num_tokens for item in batch.scheduled}


def test_a_prompt_longer_than_the_chunk_size_finishes() -> None:
    bench = Bench(max_batch_tokens=8)
    long = bench.add("long", 21)
    assert [bench.step() for _ in range(3)] == [{"long": 8}, {"long": 8}, {"long": 5}]
    assert long.status is SequenceStatus.HELD
    assert (long.num_computed_tokens, long.num_generated_tokens) == (21, 1)


def test_short_prompts_share_one_chunk_budget() -> None:
    bench = Bench(max_batch_tokens=8)
    for name, size in (("a", 3), ("b", 4), ("c", 5)):
        bench.add(name, size)
    assert bench.step() == {"a": 3, "b": 4, "c": 1}
    assert bench.step() == {"c": 4}


def test_a_batch_has_at_most_max_num_seqs_sequences() -> None:
    bench = Bench(max_batch_tokens=8, max_num_seqs=2)
    for name in "abc":
        bench.add(name, 1)
    assert [bench.step(), bench.step()] == [{"a": 1, "b": 1}, {"c": 1}]


def test_a_long_prompt_at_the_head_is_not_overtaken() -> None:
    bench = Bench(num_blocks=8, max_batch_tokens=8)
    first = bench.add("first", 4)
    bench.step()
    bench.add("long", 32)
    bench.add("short", 1)
    assert bench.step() == {}  # "first" is still held, so "long" does not fit, and "short" must not pass it
    bench.scheduler.release(first.key)
    assert bench.step() == {"long": 8}


def test_a_whole_prompt_has_its_blocks_before_its_first_chunk() -> None:
    bench = Bench(max_batch_tokens=8)
    long = bench.add("long", 21)
    batch = bench.scheduler.schedule()
    assert (batch.num_tokens, len(long.block_table)) == (8, 6)


def test_held_sequences_have_at_most_half_of_the_blocks() -> None:
    bench = Bench(num_blocks=8, max_batch_tokens=64)
    names = "abcde"
    sequences = [bench.add(name, 8) for name in names]  # two blocks each
    assert [bench.step(), bench.step()] == [{"a": 8, "b": 8}, {}]
    bench.scheduler.release(sequences[0].key)
    assert bench.step() == {"c": 8}


def test_one_alone_runs_whatever_its_size() -> None:
    bench = Bench(num_blocks=8, max_batch_tokens=64)
    huge = bench.add("huge", 32)
    bench.add("next", 1)
    assert [bench.step(), bench.step()] == [{"huge": 32}, {}]
    bench.scheduler.release(huge.key)
    assert bench.step() == {"next": 1}


def test_a_prompt_that_can_never_fit_is_refused_at_once() -> None:
    bench = Bench(num_blocks=8)
    with pytest.raises(ContextLengthExceeded, match="33 tokens and this worker can hold 32"):
        bench.add("huge", 33)
    assert bench.scheduler.load.num_waiting == 0


def test_a_full_queue_refuses() -> None:
    bench = Bench(max_queue=2)
    bench.add("a", 1)
    bench.add("b", 1)
    with pytest.raises(Overloaded, match="2 requests wait"):
        bench.add("c", 1)
    bench.step()
    bench.add("c", 1)


def test_an_abort_covers_every_attempt_up_to_it_and_no_other_request() -> None:
    bench = Bench(max_batch_tokens=4)
    held = bench.add("r", 4, attempt=0)
    bench.step()
    running, waiting = bench.add("r", 8, attempt=1), bench.add("r", 8, attempt=2)
    bench.step()
    later, other = bench.add("r", 8, attempt=3), bench.add("q", 8, attempt=0)
    assert set(bench.scheduler.abort(RequestKey("r", 2))) == {held, running, waiting}
    assert bench.blocks.ledger.leased == 0
    assert [bench.step() for _ in range(4)] == [{"r": 4}, {"r": 4}, {"q": 4}, {"q": 4}]
    assert {later.status, other.status} == {SequenceStatus.HELD}
    assert bench.scheduler.abort(RequestKey("nobody", 9)) == []


def test_an_abort_during_the_forward_keeps_the_blocks_until_it_ends() -> None:
    bench = Bench()
    sequence = bench.add("r", 8)
    batch = bench.scheduler.schedule()
    assert bench.scheduler.abort(sequence.key) == [sequence]
    assert bench.scheduler.abort(sequence.key) == []
    assert (sequence.status, bench.blocks.ledger.leased) == (SequenceStatus.ABORTED, 2)
    assert bench.finish(batch) == []
    assert (bench.blocks.ledger.leased, sequence.num_generated_tokens) == (0, 0)
    assert bench.step() == {}


def test_a_failed_forward_is_completed_by_aborting_first() -> None:
    bench = Bench()
    sequences = [bench.add("a", 3), bench.add("b", 3)]
    batch = bench.scheduler.schedule()
    for sequence in sequences:
        bench.scheduler.abort(sequence.key)
    assert bench.scheduler.complete(batch, [None, None]) == []
    assert bench.blocks.ledger.leased == 0


def test_release_frees_what_is_held_and_nothing_else() -> None:
    bench = Bench(max_batch_tokens=4)
    held, running = bench.add("a", 4), bench.add("b", 8)
    bench.step()
    bench.step()
    bench.scheduler.release(held.key)
    bench.scheduler.release(held.key)
    bench.scheduler.release(running.key)
    bench.scheduler.release(RequestKey("nobody", 0))
    assert (held.status, held.block_table) == (SequenceStatus.FINISHED, [])
    assert (running.status, bench.blocks.ledger.leased) == (SequenceStatus.RUNNING, 2)


def test_places_are_not_asked_for_prompts_that_wait_behind_others() -> None:
    """Places kept for prompts that wait starve ready ones: only what runs or is next may be offered."""
    bench = Bench(max_batch_tokens=8)
    sequences = [bench.add(name, size) for name, size in (("long", 20), ("a", 4), ("b", 4), ("c", 4), ("d", 5))]
    assert bench.scheduler.to_offer() == sequences[:3]
    batch = bench.scheduler.schedule()  # 2 of the long one, all of a, 2 of b
    assert bench.scheduler.to_offer() == [sequences[3]]  # the step after this one has no room for d
    bench.finish(batch)
    batch = bench.scheduler.schedule()  # 2 of the long one, the rest of b, all of c
    assert bench.scheduler.to_offer() == [sequences[4]]
    bench.finish(batch)
    bench.step()
    assert bench.scheduler.to_offer() == []


def test_a_prompt_done_in_one_step_is_offered_afterwards() -> None:
    bench = Bench()
    sequence = bench.add("a", 4)
    bench.step()
    assert bench.scheduler.to_offer() == [sequence]


def test_an_aborted_sequence_is_not_offered() -> None:
    bench = Bench()
    sequence = bench.add("a", 4)
    batch = bench.scheduler.schedule()
    bench.scheduler.abort(sequence.key)
    assert bench.scheduler.to_offer() == []
    bench.finish(batch)


def test_what_has_ended_takes_nothing_of_the_step_that_is_foreseen() -> None:
    """Else the next prompts would be offered a step late."""
    bench = Bench()
    aborted, following = bench.add("aborted", 16), bench.add("following", 20)
    batch = bench.scheduler.schedule()
    bench.scheduler.abort(aborted.key)
    assert bench.scheduler.to_offer() == [following]
    bench.finish(batch)


def test_the_share_that_is_foreseen_is_that_of_who_will_be_the_oldest() -> None:
    bench = Bench()
    sequences = [bench.add("last chunk", 8)]
    bench.scheduler.schedule()
    sequences += [bench.add(name, size) for name, size in (("long", 40), ("short", 7), ("other", 7))]
    assert bench.scheduler.to_offer() == sequences[:3]


def test_load_counts_sequences_by_state_and_tokens_to_compute() -> None:
    bench = Bench(max_batch_tokens=8)
    for name, size in (("a", 6), ("b", 12), ("c", 4)):
        bench.add(name, size)
    bench.step()
    load = bench.scheduler.load
    assert (load.num_waiting, load.num_running, load.num_held, load.num_waiting_tokens) == (1, 1, 1, 14)
    assert bench.scheduler.ledger == bench.blocks.ledger


def test_results_that_do_not_match_the_batch_are_refused() -> None:
    bench = Bench(max_batch_tokens=4)
    bench.add("a", 4)
    batch = bench.scheduler.schedule()
    with pytest.raises(ValueError, match="1 sequences were computed and 0 results"):
        bench.scheduler.complete(batch, [])
    with pytest.raises(ValueError, match="got the token None, but its chunk reached the last"):
        bench.scheduler.complete(batch, [None])
    with pytest.raises(RuntimeError, match="call complete"):
        bench.scheduler.schedule()
    assert [sequence.key.request_id for sequence in bench.scheduler.complete(batch, [7])] == ["a"]


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Bench(max_batch_tokens=0)
