"""A model on paper for scheduler tests: tokens follow from tokens, and each cell of KV knows the prefix it is of."""

from collections.abc import Iterable
from zlib import crc32

from kvrelay.blocks import BlockManager
from kvrelay.prefixes import Prefixes
from kvrelay.types import Batch, FinishReason, RequestKey, SamplingParams, Sequence, SequenceStatus

EOS = 0
VOCAB_SIZE = 23  # small, so that end-of-sequence comes up often


def make_sequence(
    name: str,
    num_prompt_tokens: int,
    *,
    max_tokens: int = 8,
    attempt: int = 0,
    ignore_eos: bool = True,
    prompt: str = "",
    salt: str = "",
) -> Sequence:
    """A sequence whose prompt follows from its name, or from `prompt`: of two with the same, one begins the other."""
    return Sequence(
        key=RequestKey(name, attempt),
        sample=0,
        gateway=1,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        token_ids=[crc32(f"{prompt or name} {index}".encode()) % VOCAB_SIZE for index in range(num_prompt_tokens)],
        num_prompt_tokens=num_prompt_tokens,
        cache_salt=salt,
    )


def next_token(token_ids: list[int]) -> int:
    """What the model says after `token_ids`."""
    return crc32(bytes(token_ids)) % VOCAB_SIZE


def undisturbed(sequence: Sequence, max_model_len: int) -> tuple[list[int], FinishReason]:
    """All tokens that a fresh sequence generates when nothing ever gets in its way, and why it ends."""
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    alone = Sequence(sequence.key, sequence.sample, 1, sequence.params, list(prompt), len(prompt))
    while True:
        alone.token_ids.append(next_token(alone.token_ids))
        if reason := alone.finish_reason(frozenset({EOS}), max_model_len):
            return alone.token_ids[len(prompt) :], reason


class FakeRunner:
    """Runs batches. Every forward reads all KV of the sequence so far and must find that of its own prefix and salt.

    Blocks that are handed out hold nothing, whatever they held before, and what is computed for an aborted sequence is
    as bad as what a forward leaves that stopped half way.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cells: dict[tuple[int, int], int] = {}

    def new_blocks(self, num_blocks: int) -> BlockManager:
        """Blocks whose content this runner keeps."""
        return _WatchedBlocks(num_blocks, self._block_size, self)

    def wipe(self, block_ids: list[int]) -> None:
        """Whatever these blocks held is gone."""
        for block_id in block_ids:
            for offset in range(self._block_size):
                self._cells.pop((block_id, offset), None)

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """Writes the KV of positions `start` to `end`."""
        flaw = int(sequence.status is SequenceStatus.ABORTED)
        for position in range(start, end):
            self._cells[self._cell(sequence, position)] = self._content(sequence, position) + flaw

    def read(self, sequence: Sequence, end: int) -> None:
        """Fails unless the first `end` positions hold the KV of this sequence's tokens."""
        for position in range(end):
            assert self._cells.get(self._cell(sequence, position)) == self._content(sequence, position)

    def run(self, batch: Batch) -> list[int | None]:
        """One forward: reads what was computed, writes what is scheduled, samples where the end is reached."""
        return [
            self._forward(item.sequence, item.sequence.num_computed_tokens + item.num_tokens, item.samples)
            for item in batch.scheduled
        ]

    def _forward(self, sequence: Sequence, end: int, samples: bool) -> int | None:
        self.read(sequence, sequence.num_computed_tokens)
        self.write(sequence, sequence.num_computed_tokens, end)
        return next_token(sequence.token_ids) if samples else None

    def _cell(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self._block_size], position % self._block_size

    @staticmethod
    def _content(sequence: Sequence, position: int) -> int:
        return crc32(sequence.cache_salt.encode() + bytes(sequence.token_ids[: position + 1]))


class _WatchedBlocks(BlockManager):
    def __init__(self, num_blocks: int, block_size: int, runner: FakeRunner) -> None:
        super().__init__(num_blocks, block_size)
        self._runner = runner

    def allocate(self, count: int) -> list[int]:
        block_ids = super().allocate(count)
        self._runner.wipe(block_ids)
        return block_ids


def check_batch(batch: Batch, block_size: int, max_batch_tokens: int, max_num_seqs: int) -> None:
    """A batch is within its budgets, names nobody twice, and has blocks for all that it writes."""
    assert len({item.sequence for item in batch.scheduled}) == len(batch.scheduled) <= max_num_seqs
    assert batch.num_tokens <= max_batch_tokens
    for item in batch.scheduled:
        assert 1 <= item.num_tokens <= item.sequence.num_uncomputed_tokens
        end = item.sequence.num_computed_tokens + item.num_tokens
        assert end <= len(item.sequence.block_table) * block_size


def check_passed_over(blocks: BlockManager, prefixes: Prefixes, queue: list[Sequence]) -> None:
    """Of a queue as it was before a step: there is room for all those before the last that has started."""
    started = [index for index, sequence in enumerate(queue) if sequence.status is SequenceStatus.RUNNING]
    passed = [item for item in queue[: max(started, default=0)] if item.status is not SequenceStatus.RUNNING]
    need = sum(blocks.blocks_for(len(item.token_ids)) - prefixes.find(item).num_in_use for item in passed)
    assert need <= blocks.num_free


def check_ledger(blocks: BlockManager, sequences: Iterable[Sequence], outside: Iterable[Sequence] = ()) -> None:
    """Every leased block is in a block table, in several only where they begin alike, and no block is lost.

    `outside` are sequences whose blocks are leased, but not the scheduler's.
    """
    held: dict[int, tuple[str, list[int]]] = {}
    for sequence in (*sequences, *outside):
        for index, block_id in enumerate(sequence.block_table):
            prefix = sequence.token_ids[: (index + 1) * blocks.block_size]
            assert held.setdefault(block_id, (sequence.cache_salt, prefix)) == (sequence.cache_salt, prefix)
        assert len(set(sequence.block_table)) == len(sequence.block_table)
    assert blocks.ledger.conserved
    assert len(held) == blocks.ledger.leased
