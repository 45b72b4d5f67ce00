"""Prompts that begin like earlier ones: what is computed, what is shared, and what never is."""

from collections.abc import Callable

from kvrelay.blocks import BlockManager
from kvrelay.prefill.scheduler import PrefillScheduler
from kvrelay.prefixes import Prefixes
from kvrelay.types import Sequence, SequenceStatus
from tests.fake_runner import FakeRunner, make_sequence


class Bench:
    """A scheduler with a prefix cache; blocks hold 4 tokens."""

    def __init__(
        self, num_blocks: int = 64, max_batch_tokens: int = 16, reserve: Callable[[int], int] | None = None
    ) -> None:
        self.runner = FakeRunner(block_size=4)
        self.blocks: BlockManager = self.runner.new_blocks(num_blocks)
        self.scheduler = PrefillScheduler(
            self.blocks,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=8,
            max_queue=16,
            reserve=reserve,
            prefixes=Prefixes(self.blocks, "model"),
        )

    def add(self, name: str, num_prompt_tokens: int, *, prompt: str = "p", salt: str = "") -> Sequence:
        sequence = make_sequence(name, num_prompt_tokens, prompt=prompt, salt=salt)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """One step; the tokens computed of each request."""
        batch = self.scheduler.schedule()
        self.scheduler.complete(batch, self.runner.run(batch))
        return {item.sequence.key.request_id: item.num_tokens for item in batch.scheduled}

    def hand_over(self, sequence: Sequence) -> None:
        """What was sent is this prompt's KV; then its blocks are let go."""
        assert sequence.status is SequenceStatus.HELD
        self.runner.read(sequence, sequence.num_prompt_tokens)
        self.scheduler.release(sequence.key)

    def run(self, name: str, num_prompt_tokens: int, *, prompt: str = "p", salt: str = "") -> int:
        """A prompt from its arrival to its hand-over; how many of its tokens were computed."""
        sequence = self.add(name, num_prompt_tokens, prompt=prompt, salt=salt)
        num_computed = 0
        while sequence.status is not SequenceStatus.HELD:
            num_computed += self.step()[name]
        assert num_computed + sequence.num_cached_tokens == num_prompt_tokens
        self.hand_over(sequence)
        return num_computed


def test_a_prompt_that_grows_computes_only_what_is_new() -> None:
    bench = Bench()
    assert [bench.run(f"turn {turn}", 10 * turn) for turn in range(1, 9)] == [10, 12, 10, 12, 10, 12, 10, 12]
    assert bench.blocks.ledger.leased == 0


def test_cached_tokens_are_never_more_than_the_prompt() -> None:
    """cached_tokens larger than prompt_tokens: of a prompt that is there as a whole, the last block is computed."""
    bench = Bench()
    bench.run("first", 16)
    assert [bench.run(f"again {size}", size) for size in (16, 15, 9, 8, 4, 1)] == [4, 3, 1, 4, 4, 1]


def test_blocks_are_shared_while_they_are_in_use_and_count_once() -> None:
    bench = Bench(num_blocks=8)
    first = bench.add("first", 12)
    bench.step()
    second = bench.add("second", 13)  # alone it would need 4 blocks, and only half of 8 may be held
    assert bench.step() == {"second": 1}
    assert second.block_table[:3] == first.block_table
    assert bench.blocks.ledger.leased == 4
    bench.hand_over(first)
    assert bench.blocks.ledger.leased == 4
    bench.hand_over(second)
    assert (bench.blocks.ledger.leased, bench.blocks.ledger.cached) == (0, 3)


def test_another_salt_or_another_beginning_shares_nothing() -> None:
    """No request sees another's KV."""
    bench = Bench()
    bench.run("first", 12)
    assert bench.run("salted", 12, salt="mine") == 12
    assert bench.run("other", 12, prompt="other") == 12
    assert bench.run("salted again", 12, salt="mine") == 4


def test_a_chunk_is_shared_as_soon_as_it_is_computed_and_not_before() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.add("first", 16)
    batch = bench.scheduler.schedule()
    second = bench.add("second", 16)
    bench.scheduler.complete(batch, bench.runner.run(batch))
    assert bench.step() == {"first": 8}
    assert bench.step() == {"second": 4}
    assert second.num_cached_tokens == 12


def test_what_an_abort_left_half_computed_is_not_shared() -> None:
    """Abort during the forward: blocks half written must not serve another request."""
    bench = Bench(max_batch_tokens=8)
    aborted = bench.add("aborted", 16)
    bench.step()
    batch = bench.scheduler.schedule()
    bench.scheduler.abort(aborted.key)
    bench.scheduler.complete(batch, bench.runner.run(batch))
    assert bench.blocks.ledger.leased == 0
    assert bench.run("again", 16) == 8


def test_blocks_released_and_reused_are_not_read_for_the_prefix_they_held() -> None:
    """A read of blocks that had already been released and reused."""
    bench = Bench(num_blocks=4, max_batch_tokens=64)
    bench.run("first", 16)
    bench.run("other", 8, prompt="other")  # takes the last two of the first's blocks
    assert bench.run("again", 16) == 8
    bench.run("other", 16, prompt="else")
    assert bench.run("yet again", 16) == 16


def test_prefix_hits_while_the_block_is_being_evicted() -> None:
    """Two prompts start in one step, and the first takes blocks in which the second was to begin."""
    bench = Bench(num_blocks=12, max_batch_tokens=64, reserve=lambda others: 0)
    bench.run("old", 16)
    bench.run("new", 24, prompt="new")
    bench.blocks.allocate(2)  # no block is free that is not cached
    bench.add("taker", 12, prompt="taker")
    second = bench.add("second", 17)
    assert bench.step() == {"taker": 12, "second": 1}  # planned when 16 of its tokens were cached
    assert second.num_cached_tokens == 4
    assert bench.step() == {"second": 12}
    bench.hand_over(second)


def test_cached_blocks_are_not_counted_twice_as_found_and_as_free() -> None:
    bench = Bench(num_blocks=8, reserve=lambda others: 0)
    bench.run("first", 16)
    outside = bench.blocks.allocate(4)
    bench.add("longer", 20)
    assert bench.step() == {}
    bench.blocks.release(outside[:1])
    assert bench.step() == {"longer": 4}


def test_a_long_cached_prefix_leaves_the_chunk_to_others() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.run("first", 32)
    bench.add("again", 34)
    bench.add("new", 6, prompt="new")
    assert bench.step() == {"again": 2, "new": 6}


def test_of_prompts_that_begin_alike_hardly_more_than_one_computes_the_beginning() -> None:
    """Their lengths differ little, so the first is not set aside while the others could find what it has computed."""
    bench = Bench(max_batch_tokens=16, num_blocks=512)
    for size in range(110, 102, -1):
        bench.add(f"alike {size}", size)
    bench.add("short", 3, prompt="short")
    steps = [bench.step() for _ in range(20)]
    assert sum(sum(step.values()) for step in steps) < 150
