"""A model on paper for scheduler tests: tokens follow from tokens, and each cell of KV knows whose it is."""

from collections.abc import Iterable
from zlib import crc32

from kvrelay.blocks import BlockManager
from kvrelay.types import Batch, FinishReason, RequestKey, SamplingParams, Sequence

EOS = 0
VOCAB_SIZE = 23  # small, so that end-of-sequence comes up often


def make_sequence(
    name: str, num_prompt_tokens: int, *, max_tokens: int = 8, attempt: int = 0, ignore_eos: bool = True
) -> Sequence:
    """A sequence whose prompt follows from its name."""
    return Sequence(
        key=RequestKey(name, attempt),
        sample=0,
        gateway=1,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        token_ids=[crc32(f"{name} {position}".encode()) % VOCAB_SIZE for position in range(num_prompt_tokens)],
        num_prompt_tokens=num_prompt_tokens,
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
    """Runs batches. Every forward reads all KV of the sequence so far and must find what that sequence wrote."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cells: dict[tuple[int, int], int] = {}

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """Writes the KV of positions `start` to `end`."""
        for position in range(start, end):
            self._cells[self._cell(sequence, position)] = self._content(sequence, position)

    def run(self, batch: Batch) -> list[int | None]:
        """One forward: reads what was computed, writes what is scheduled, samples where the end is reached."""
        return [
            self._forward(item.sequence, item.sequence.num_computed_tokens + item.num_tokens, item.samples)
            for item in batch.scheduled
        ]

    def _forward(self, sequence: Sequence, end: int, samples: bool) -> int | None:
        for position in range(sequence.num_computed_tokens):
            assert self._cells[self._cell(sequence, position)] == self._content(sequence, position)
        self.write(sequence, sequence.num_computed_tokens, end)
        return next_token(sequence.token_ids) if samples else None

    def _cell(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self._block_size], position % self._block_size

    @staticmethod
    def _content(sequence: Sequence, position: int) -> int:
        owner = f"{sequence.key} {sequence.sample}".encode()
        return crc32(owner + bytes(sequence.token_ids[: position + 1]))


def check_batch(batch: Batch, block_size: int, max_batch_tokens: int, max_num_seqs: int) -> None:
    """A batch is within its budgets, names nobody twice, and has blocks for all that it writes."""
    assert len({item.sequence for item in batch.scheduled}) == len(batch.scheduled) <= max_num_seqs
    assert batch.num_tokens <= max_batch_tokens
    for item in batch.scheduled:
        assert 1 <= item.num_tokens <= item.sequence.num_uncomputed_tokens
        end = item.sequence.num_computed_tokens + item.num_tokens
        assert end <= len(item.sequence.block_table) * block_size


def check_ledger(blocks: BlockManager, sequences: Iterable[Sequence], outside: Iterable[list[int]] = ()) -> None:
    """Every leased block is in exactly one block table or outside lease, and no block is lost."""
    used = [block for sequence in sequences for block in sequence.block_table]
    used += [block for lease in outside for block in lease]
    assert blocks.ledger.conserved
    assert len(set(used)) == len(used) == blocks.ledger.leased
