"""In which order prompts are computed: short ones do not wait for long ones, and nobody waits for ever."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import Overloaded
from kvrelay.types import SequenceStatus
from tests.fake_runner import check_batch
from tests.prefill.test_scheduler import Bench


def test_a_short_prompt_that_comes_later_ends_before_a_long_one() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.add("long", 30)
    assert bench.step() == {"long": 8}
    bench.add("short", 7)
    assert bench.step() == {"long": 2, "short": 6}
    assert bench.step() == {"long": 7, "short": 1}
    assert bench.step() == {"long": 8}


def test_the_oldest_has_a_quarter_of_each_step_whatever_else_comes() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.add("long", 30)
    for number in range(10):
        bench.add(f"short {number}", 7)
        assert bench.step()["long"] == 2


def test_the_share_of_the_oldest_is_at_least_a_token() -> None:
    bench = Bench(max_batch_tokens=3)
    bench.add("long", 30)
    bench.add("short", 3)
    assert bench.step() == {"long": 1, "short": 2}


def test_what_others_take_of_a_step_is_no_part_of_the_share() -> None:
    bench = Bench(max_batch_tokens=16, max_num_seqs=16)
    bench.add("long", 60)
    bench.add("short", 6)
    batch = bench.scheduler.schedule(taken=8)
    assert [item.num_tokens for item in batch.scheduled] == [2, 6]
    bench.finish(batch)
    assert not bench.scheduler.schedule(taken=16)


def test_the_oldest_is_who_came_first_and_not_who_started_first() -> None:
    bench = Bench(max_batch_tokens=4)
    first = bench.add("first", 20)
    bench.add("second", 40)
    bench.add("third", 9)
    assert bench.step() == {"first": 1, "third": 3}
    bench.scheduler.abort(first.key)
    assert bench.step() == {"second": 1, "third": 3}


def test_one_that_is_hardly_shorter_does_not_overtake() -> None:
    """Else each would be set aside for the next, and all of them hold blocks for long."""
    bench = Bench(max_batch_tokens=8)
    bench.add("a", 15)
    bench.add("b", 8)
    assert [bench.step() for _ in range(3)] == [{"a": 8}, {"a": 7, "b": 1}, {"b": 7}]


def test_who_is_passed_over_finds_its_blocks_free() -> None:
    """A large prompt must not be starved of blocks by small ones that come later."""
    bench = Bench(num_blocks=24, max_batch_tokens=16)  # half of them for more than one: 12
    passed = [bench.add("first", 20), bench.add("second", 20)]  # 5 blocks each
    short, late = bench.add("short", 8), bench.add("late", 1)  # 2 blocks, and 1 that would be the 13th
    assert bench.step() == {"first": 8, "short": 8}
    assert (passed[1].block_table, late.block_table) == ([], [])
    assert bench.step() == {"first": 12, "second": 4}
    bench.scheduler.release(short.key)
    assert bench.step() == {"second": 15, "late": 1}


def test_who_is_passed_over_keeps_its_seat() -> None:
    bench = Bench(max_batch_tokens=8, max_num_seqs=2)
    for name, size in (("first", 20), ("second", 20), ("third", 1)):
        bench.add(name, size)
    assert bench.step() == {"first": 8}
    assert bench.step() == {"first": 8}
    assert bench.step() == {"first": 4, "second": 4}
    assert bench.step() == {"second": 7, "third": 1}


def test_preempted_sequences_start_before_all_that_never_ran() -> None:
    bench = Bench(max_batch_tokens=8)
    sequence = bench.add("preempted", 20)
    bench.step()
    bench.scheduler.preempt(sequence)
    bench.add("new", 1)
    assert bench.step() == {"preempted": 8}
    assert bench.step() == {"preempted": 7, "new": 1}


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    limits=st.tuples(st.integers(10, 40), st.integers(1, 12), st.integers(1, 4)),
    size=st.integers(1, 6),
)
def test_every_prompt_ends_however_many_shorter_ones_keep_coming(
    sizes: list[int], limits: tuple[int, int, int], size: int
) -> None:
    """Each waits at most for those before it and, when it lacks blocks or a seat, for those that run then."""
    num_blocks, max_batch_tokens, max_num_seqs = limits
    bench = Bench(num_blocks, max_batch_tokens, max_num_seqs, max_queue=32)
    share = max(1, max_batch_tokens // 4)
    most = -(-max(*sizes, size) // share)
    prompts = [bench.add(f"prompt {index}", length) for index, length in enumerate(sizes)]
    for number in range(len(prompts) * most * (1 + max_num_seqs)):
        _fill_the_queue(bench, number, size, max_batch_tokens)
        batch = bench.scheduler.schedule()
        check_batch(batch, 4, max_batch_tokens, max_num_seqs)
        oldest = min(bench.scheduler.running, key=lambda sequence: sequence.arrival)
        assert oldest in [item.sequence for item in batch.scheduled]
        for sequence in bench.finish(batch):
            bench.scheduler.release(sequence.key)
    assert {sequence.status for sequence in prompts} == {SequenceStatus.FINISHED}


def _fill_the_queue(bench: Bench, number: int, size: int, max_batch_tokens: int) -> None:
    """As many short prompts as a step can compute, or as the queue takes."""
    for index in range(-(-max_batch_tokens // size)):
        try:
            bench.add(f"short {number} {index}", size)
        except Overloaded:
            return
