"""The indexes of a batch for the Triton kernels: which rows there are, and where their KV lies.

Sequences with one token each come first, in the order of the batch, then those with several: each kind has a kernel.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from kvrelay.model.step_plan import Span, begun_blocks, slots_of, spans_of
from kvrelay.types import Batch, KVLayout

Array = TypeVar("Array")


@dataclass(frozen=True, slots=True)
class TritonPlan(Generic[Array]):
    """What a forward pass needs to know about N rows, on the host or on a device.

    D sequences decode, one row each, and S have a chunk of several rows; tables are filled up with block 0.
    """

    max_queries: int  # rows of the longest chunk
    token_ids: Array  # [N], int64
    positions: Array  # [N], int64
    slots: Array  # [N], int64; -1 where nothing is kept
    sampled_rows: Array  # int64, in the batch's order
    begun_blocks: Array  # int64, whose first token is in this step and last is not
    decode_tables: Array  # [D, blocks], int32
    decode_counts: Array  # [D], int32; positions, the row's own the last
    chunk_tables: Array  # [S, blocks], int32
    chunk_counts: Array  # [S], int32; positions, those of the chunk the last
    chunk_starts: Array  # [S + 1], int32; rows, counted from the first of a chunk

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All of them, in their order."""
        return tuple(getattr(self, name) for name in _ARRAYS)


_ARRAYS = [field.name for field in dataclasses.fields(TritonPlan)][1:]
Other = TypeVar("Other")


def with_arrays(plan: TritonPlan[Array], arrays: Sequence[Other]) -> TritonPlan[Other]:
    """The same plan of the same arrays elsewhere."""
    return TritonPlan(plan.max_queries, *arrays)


def plan_triton(batch: Batch, layout: KVLayout, num_blocks: int) -> TritonPlan[np.ndarray]:
    """Works out the indexes of a batch that is not empty.

    Raises InternalError if a sequence's tokens or blocks do not cover what is scheduled.
    """
    spans = spans_of(batch, layout, num_blocks)
    decode = [span for span in spans if span.stop - span.start == 1]
    chunks = [span for span in spans if span.stop - span.start > 1]
    ordered, starts = decode + chunks, _int64([span.start for span in decode])
    ends = np.cumsum([span.stop - span.start for span in ordered])
    last_rows = {span.row: end - 1 for span, end in zip(ordered, ends, strict=True)}
    return TritonPlan(
        token_ids=_int64([token for span in ordered for token in span.token_ids]),
        positions=np.concatenate([starts, *(np.arange(span.start, span.stop) for span in chunks)]),
        slots=np.concatenate(
            [
                _int64([span.blocks[-1] for span in decode]) * layout.block_size + starts % layout.block_size,
                *(slots_of(span, layout.block_size) for span in chunks),
            ]
        ),
        sampled_rows=_int64([last_rows[span.row] for span in spans if span.samples]),
        begun_blocks=_int64(begun_blocks(spans, layout.block_size)),
        decode_tables=_tables(decode),
        decode_counts=_counts(decode),
        chunk_tables=_tables(chunks),
        chunk_counts=_counts(chunks),
        chunk_starts=np.cumsum([0, *(span.stop - span.start for span in chunks)], dtype=np.int32),
        max_queries=max((span.stop - span.start for span in chunks), default=0),
    )


def padding(num_rows: int, num_blocks: int) -> TritonPlan[np.ndarray]:
    """A plan of decoding rows with tables of so many blocks, all of which keep no KV and attend over nothing."""
    none, nowhere = np.zeros((0,), np.int32), np.full(num_rows, -1)
    return TritonPlan(
        max_queries=0,
        token_ids=np.zeros_like(nowhere),
        positions=np.zeros_like(nowhere),
        slots=nowhere,
        sampled_rows=np.arange(num_rows),
        begun_blocks=np.zeros_like(nowhere),
        decode_tables=np.zeros((num_rows, num_blocks), np.int32),
        decode_counts=np.zeros(num_rows, np.int32),
        chunk_tables=none.reshape(0, 0),
        chunk_counts=none,
        chunk_starts=np.zeros(1, np.int32),
    )


def padded(plan: TritonPlan[np.ndarray], num_rows: int, num_blocks: int) -> TritonPlan[np.ndarray]:
    """A plan of decoding rows alone, all of which sample, filled up with `padding` to so many rows and blocks.

    Raises ValueError if the plan has more rows or blocks.
    """
    rows, blocks = plan.decode_tables.shape
    if rows > num_rows or blocks > num_blocks:
        raise ValueError(f"{rows} rows of {blocks} blocks do not fit into {num_rows} of {num_blocks}.")
    larger = padding(num_rows, num_blocks)
    larger.token_ids[:rows] = plan.token_ids
    larger.positions[:rows] = plan.positions
    larger.slots[:rows] = plan.slots
    larger.begun_blocks[: len(plan.begun_blocks)] = plan.begun_blocks
    larger.decode_tables[:rows, :blocks] = plan.decode_tables
    larger.decode_counts[:rows] = plan.decode_counts
    return larger


def _tables(spans: list[Span]) -> np.ndarray:
    tables = np.zeros((len(spans), max((len(span.blocks) for span in spans), default=0)), np.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.blocks)] = span.blocks
    return tables


def _counts(spans: list[Span]) -> np.ndarray:
    return np.array([span.stop for span in spans], np.int32)


def _int64(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)
