"""The indexes of a batch for the native kernels: which rows there are, and where their KV lies."""

from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.kernels.attention import PagedRows
from kvrelay.kernels.pointwise import WrittenRows
from kvrelay.model.step_plan import begun_blocks, slots_of, spans_of
from kvrelay.types import Batch, KVLayout


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What a forward pass needs to know about a batch; all int64."""

    token_ids: torch.Tensor  # [N]
    read: PagedRows
    written: WrittenRows
    sampled_rows: torch.Tensor


def plan_native(batch: Batch, layout: KVLayout, num_blocks: int, num_positions: int) -> NativePlan:
    """Works out the indexes of a batch that is not empty.

    Raises InternalError if a sequence's tokens or blocks do not cover what is scheduled.
    """
    spans = spans_of(batch, layout, num_blocks)
    return NativePlan(
        token_ids=_tensor([token for span in spans for token in span.token_ids]),
        # Not through `build`: `spans_of` has checked all of it, and this is done in every step.
        read=PagedRows(
            row_offsets=_offsets([span.stop - span.start for span in spans]),
            starts=_tensor([span.start for span in spans]),
            table_offsets=_offsets([len(span.blocks) for span in spans]),
            block_ids=_tensor(np.concatenate([span.blocks for span in spans])),
            block_size=layout.block_size,
            num_blocks=num_blocks,
        ),
        written=WrittenRows(
            positions=_tensor(np.concatenate([np.arange(span.start, span.stop) for span in spans])),
            slots=_tensor(np.concatenate([slots_of(span, layout.block_size) for span in spans])),
            begun=_tensor(begun_blocks(spans, layout.block_size)),
            block_size=layout.block_size,
            num_blocks=num_blocks,
            num_positions=num_positions,
        ),
        sampled_rows=_tensor([span.row + span.stop - span.start - 1 for span in spans if span.samples]),
    )


def _offsets(lengths: list[int]) -> torch.Tensor:
    return _tensor(np.cumsum([0, *lengths]))


def _tensor(values: np.ndarray | list[int]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int64))
