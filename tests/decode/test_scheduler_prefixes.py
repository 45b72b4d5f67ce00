"""Generation and the prefix cache: what finished and preempted sequences leave behind, and who finds it."""

from kvrelay.decode.scheduler import DecodeScheduler
from kvrelay.prefixes import Prefixes
from kvrelay.types import RequestKey, Sequence, SequenceStatus
from tests.fake_runner import EOS, FakeRunner, make_sequence, next_token, undisturbed

MAX_MODEL_LEN = 40


class Bench:
    """A scheduler with a prefix cache; blocks hold 4 tokens."""

    def __init__(self, num_blocks: int = 64, max_batch_tokens: int = 64) -> None:
        self.runner = FakeRunner(block_size=4)
        self.blocks = self.runner.new_blocks(num_blocks)
        self.prefixes = Prefixes(self.blocks, "model")
        self.scheduler = DecodeScheduler(
            self.blocks,
            max_num_seqs=8,
            max_batch_tokens=max_batch_tokens,
            max_queue=16,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            prefixes=self.prefixes,
        )
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, token_ids: list[int], *, max_tokens: int = 8) -> Sequence:
        sequence = make_sequence(name, 1, max_tokens=max_tokens)
        sequence.token_ids, sequence.num_prompt_tokens = list(token_ids), len(token_ids)
        self.scheduler.add(sequence)
        return sequence

    def adopt(self, name: str, num_prompt_tokens: int, *, max_tokens: int = 8) -> Sequence:
        """What a receiver does; every prompt begins alike, and what is there is not written again."""
        sequence = make_sequence(name, num_prompt_tokens, max_tokens=max_tokens, prompt="p")
        held = self.blocks.match(self.prefixes.extend([], sequence.token_ids, ""))
        sequence.block_table = held + self.blocks.allocate(self.blocks.blocks_for(num_prompt_tokens) - len(held))
        self.runner.write(sequence, 4 * len(held), num_prompt_tokens)
        sequence.num_computed_tokens = num_prompt_tokens
        self.prefixes.publish(sequence, num_prompt_tokens)
        sequence.token_ids.append(next_token(sequence.token_ids))
        self.scheduler.adopt(sequence)
        self.tokens[name] = sequence.token_ids[num_prompt_tokens:]
        return sequence

    def step(self) -> dict[str, int]:
        """One step; the tokens computed of each request."""
        batch = self.scheduler.schedule()
        computed = {item.sequence.key.request_id: item.num_tokens for item in batch.scheduled}
        for token in self.scheduler.complete(batch, self.runner.run(batch)):
            self.tokens.setdefault(token.sequence.key.request_id, []).append(token.token_id)
        return computed

    def run(self) -> int:
        """Steps until nothing is left; how many tokens were computed."""
        num_computed = 0
        while self.scheduler.has_work:
            num_computed += sum(self.step().values())
        assert self.blocks.ledger.leased == 0
        return num_computed

    def check(self, *sequences: Sequence) -> None:
        """All of them got the tokens they would have got alone."""
        for sequence in sequences:
            assert self.tokens[sequence.key.request_id] == undisturbed(sequence, MAX_MODEL_LEN)[0]


def test_finished_generations_stay_cached_with_what_was_generated() -> None:
    bench = Bench()
    adopted = bench.adopt("first", 6, max_tokens=12)
    bench.run()
    grown = bench.add("next turn", [*adopted.token_ids, 1, 2])
    assert bench.run() == 20 - 16 + 7  # 17 of its 18 tokens had KV, so 4 blocks; then 7 steps for 8 tokens
    assert grown.num_cached_tokens == 16
    bench.check(adopted, grown)


def test_an_answer_that_was_cut_short_is_found_as_far_as_it_was_computed() -> None:
    bench = Bench()
    stopped = bench.adopt("stopped", 6, max_tokens=30)
    for _ in range(6):
        bench.step()
    batch = bench.scheduler.schedule()
    bench.scheduler.abort(RequestKey("stopped", 0))
    bench.scheduler.complete(batch, bench.runner.run(batch))
    grown = bench.add("next turn", stopped.token_ids)
    bench.run()
    assert grown.num_cached_tokens == 12
    bench.check(grown)


def test_preempted_sequences_find_their_own_blocks_again() -> None:
    bench = Bench(num_blocks=10)
    first, second = bench.adopt("first", 15, max_tokens=12), bench.add("second", make_sequence("s", 20).token_ids)
    bench.step()
    grant = bench.blocks.allocate(bench.blocks.num_free)
    while second.status is not SequenceStatus.PREEMPTED:
        bench.step()
    bench.blocks.release(grant)
    while second.status is SequenceStatus.PREEMPTED:
        computed = bench.step()
    assert computed["second"] < 20
    assert second.num_cached_tokens == 0  # it had computed them itself
    bench.run()
    bench.check(first, second)


def test_preempting_one_that_shares_all_of_its_blocks_frees_none_so_another_goes_too() -> None:
    bench = Bench(num_blocks=10)
    first = bench.adopt("first", 16, max_tokens=16)
    sharers = [bench.adopt(name, 16, max_tokens=16) for name in "ab"]
    assert bench.blocks.ledger.leased == 4
    grant = bench.blocks.allocate(5)
    bench.step()  # the first takes the last block; the others have none that is theirs alone
    assert [sequence.status for sequence in sharers] == [SequenceStatus.RUNNING, SequenceStatus.PREEMPTED]
    for _ in range(4):
        bench.step()
    assert sharers[0].status is SequenceStatus.PREEMPTED
    bench.blocks.release(grant)
    bench.run()
    bench.check(first, *sharers)


def test_a_prompt_computed_here_is_found_by_hand_overs_and_the_other_way_round() -> None:
    bench = Bench()
    local = bench.add("local", make_sequence("x", 12, prompt="p").token_ids)
    bench.step()
    adopted = bench.adopt("adopted", 14)
    assert adopted.block_table[:3] == local.block_table[:3]
    bench.step()
    assert bench.add("again", make_sequence("x", 14, prompt="p").token_ids)
    assert bench.step()["again"] == 2
    bench.run()
    bench.check(local, adopted)
