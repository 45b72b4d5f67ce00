"""What one forward pass reads and writes: the indexes of a batch, worked out once and used in every layer.

The rows of a step are the scheduled tokens of all sequences, packed in the order of the batch. A *cache row* is one
head of one token, `head_dim` values; a *cache strip* is one head of one block, `block_size` cache rows, contiguous.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.errors import InternalError
from kvrelay.types import Batch, KVLayout, ScheduledSequence

_SCRATCH_BYTES = 8 << 20  # of gathered KV at a time, so that attention finds it still in the CPU's cache
_MIN_PADDED_POSITIONS = 128


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length with one token each, attended together over G padded contexts of T positions."""

    rows: torch.Tensor  # [G] rows of the step
    strips: torch.Tensor  # [G * 2 * num_kv_heads * T / block_size]
    mask: torch.Tensor  # [G, 1, 1, T], added to the scores: 0 where a position exists, else -inf


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several tokens of one sequence, from position `start`, attended over all positions up to their own."""

    rows: slice
    start: int
    strips: torch.Tensor  # [2 * num_kv_heads * number of blocks up to the chunk's end]
    mask: torch.Tensor | None  # [tokens, positions], added to the scores; None if the chunk begins at position 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything a forward pass needs to know about a batch. N is the number of rows."""

    token_ids: torch.Tensor  # [N]
    positions: torch.Tensor  # [N]
    written: torch.Tensor  # [N * 2 * num_kv_heads] cache rows of the step's KV
    begun_blocks: torch.Tensor  # blocks whose first token is in this step and last is not
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]
    sampled_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One scheduled sequence: rows `row` onwards are its positions `start` to `stop`."""

    row: int
    start: int
    stop: int
    token_ids: list[int]
    blocks: np.ndarray
    samples: bool


def plan_step(batch: Batch, layout: KVLayout, num_blocks: int, device: torch.device, dtype: torch.dtype) -> StepPlan:
    """Works out the indexes of a batch that is not empty; `dtype` is that of its queries.

    Raises InternalError if a sequence's tokens or blocks do not cover what is scheduled.
    """
    spans = spans_of(batch, layout, num_blocks)
    positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    blocks = np.concatenate([span.blocks[np.arange(span.start, span.stop) // layout.block_size] for span in spans])
    decode = [span for span in spans if span.stop - span.start == 1]
    return StepPlan(
        token_ids=_tensor([token for span in spans for token in span.token_ids], device),
        positions=_tensor(positions, device),
        written=_tensor(_cache_rows(blocks, positions % layout.block_size, layout), device),
        begun_blocks=_tensor(begun_blocks(spans, layout.block_size), device),
        decode=tuple(_decode_group(group, layout, device, dtype) for group in _groups(decode, layout)),
        prefill=tuple(_prefill_chunk(span, layout, device, dtype) for span in spans if span.stop - span.start > 1),
        sampled_rows=_tensor([span.row + span.stop - span.start - 1 for span in spans if span.samples], device),
    )


def padded_positions(num_positions: int) -> int:
    """The context length that a decoding sequence is padded to: at most a quarter more, and few different ones.

    It depends on the sequence alone, so that its sums are made in the same way whatever else is in the batch.
    """
    step = max(_MIN_PADDED_POSITIONS, 1 << max(num_positions.bit_length() - 3, 0))
    return -(-num_positions // step) * step


def spans_of(batch: Batch, layout: KVLayout, num_blocks: int) -> list[Span]:
    spans, row = [], 0
    for item in batch.scheduled:
        spans.append(_span(item, row, layout, num_blocks))
        row += item.num_tokens
    blocks = np.concatenate([span.blocks for span in spans])  # looked at together, which takes a fraction of the time
    if blocks.min() < 0 or blocks.max() >= num_blocks:
        raise next(_does_not_fit(item, layout, num_blocks) for item in batch.scheduled if _is_beyond(item, num_blocks))
    return spans


def _span(item: ScheduledSequence, row: int, layout: KVLayout, num_blocks: int) -> Span:
    sequence, start = item.sequence, item.sequence.num_computed_tokens
    stop = start + item.num_tokens
    if not start < stop <= len(sequence.token_ids):
        raise InternalError(
            f"Request {sequence.key.request_id}: {item.num_tokens} tokens after {start} were scheduled of "
            f"{len(sequence.token_ids)} known ones."
        )
    needed = layout.num_blocks(stop)
    blocks = np.asarray(sequence.block_table[:needed], np.int64)
    if len(blocks) < needed:
        raise _does_not_fit(item, layout, num_blocks)
    return Span(row, start, stop, sequence.token_ids[start:stop], blocks, item.samples)


def _is_beyond(item: ScheduledSequence, num_blocks: int) -> bool:
    return any(not 0 <= block_id < num_blocks for block_id in item.sequence.block_table)


def _does_not_fit(item: ScheduledSequence, layout: KVLayout, num_blocks: int) -> InternalError:
    sequence, stop = item.sequence, item.sequence.num_computed_tokens + item.num_tokens
    return InternalError(
        f"Request {sequence.key.request_id}: {stop} tokens need {layout.num_blocks(stop)} of the {num_blocks} blocks, "
        f"but its table is {sequence.block_table}."
    )


def slots_of(span: Span, block_size: int) -> np.ndarray:
    """Where the KV of a span's positions lies, int64: slot `block_id * block_size + offset` for each."""
    positions = np.arange(span.start, span.stop)
    slots: np.ndarray = span.blocks[positions // block_size] * block_size + positions % block_size
    return slots


def _cache_rows(blocks: np.ndarray, offsets: np.ndarray, layout: KVLayout) -> np.ndarray:
    """For tokens in `blocks` at `offsets` the cache rows of their keys, then values, head by head."""
    strips_per_block = 2 * layout.num_kv_heads
    first = blocks * strips_per_block * layout.block_size + offsets
    rows: np.ndarray = first[:, None] + np.arange(strips_per_block) * layout.block_size
    return rows.reshape(-1)


def _strips(block_tables: np.ndarray, layout: KVLayout) -> np.ndarray:
    """For tables `[G, blocks]` the strips in the order `[G, 2, num_kv_heads, blocks]`."""
    strips_per_block = 2 * layout.num_kv_heads
    strips: np.ndarray = block_tables[:, None, :] * strips_per_block + np.arange(strips_per_block)[:, None]
    return strips.reshape(-1)


def begun_blocks(spans: list[Span], block_size: int) -> list[int]:
    """Only a span's last block can be begun in this step and left unfinished."""
    last = [(span, (span.stop - 1) // block_size) for span in spans]
    return [
        int(span.blocks[index])
        for span, index in last
        if span.start <= index * block_size and span.stop < (index + 1) * block_size
    ]


def _groups(spans: list[Span], layout: KVLayout) -> list[list[Span]]:
    """Sequences of the same padded length, as many at a time as the scratch memory holds."""
    by_length: dict[int, list[Span]] = {}
    for span in spans:
        by_length.setdefault(padded_positions(span.stop), []).append(span)
    groups = []
    for length, members in sorted(by_length.items()):
        most = max(_SCRATCH_BYTES // (layout.num_blocks(length) * layout.block_bytes), 1)
        groups += [members[first : first + most] for first in range(0, len(members), most)]
    return groups


def _decode_group(spans: list[Span], layout: KVLayout, device: torch.device, dtype: torch.dtype) -> DecodeGroup:
    num_blocks = layout.num_blocks(padded_positions(spans[0].stop))
    # Padding repeats the sequence's own first block: what is masked must be finite, and must not be another's.
    tables = np.stack([np.pad(span.blocks, (0, num_blocks - len(span.blocks)), mode="wrap") for span in spans])
    lengths = np.array([span.stop for span in spans])
    mask = np.arange(num_blocks * layout.block_size) < lengths[:, None]
    return DecodeGroup(
        rows=_tensor([span.row for span in spans], device),
        strips=_tensor(_strips(tables, layout), device),
        mask=_additive(mask[:, None, None], device, dtype),
    )


def _prefill_chunk(span: Span, layout: KVLayout, device: torch.device, dtype: torch.dtype) -> PrefillChunk:
    rows = slice(span.row, span.row + span.stop - span.start)
    strips = _tensor(_strips(span.blocks[None], layout), device)
    if span.start == 0:
        return PrefillChunk(rows, 0, strips, None)
    mask = np.arange(span.stop) <= np.arange(span.start, span.stop)[:, None]
    return PrefillChunk(rows, span.start, strips, _additive(mask, device, dtype))


def _additive(visible: np.ndarray, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(~visible), float("-inf")).to(device)


def _tensor(values: np.ndarray | list[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int64)).to(device)
