"""What Triton's kernels are told of a batch, and how it comes to the device."""

import dataclasses

import numpy as np
import pytest
import torch

from kvrelay.model.device_arrays import DeviceArrays, on_device
from kvrelay.model.triton_plan import TritonPlan, padded, padding, plan_triton, with_arrays
from kvrelay.types import Batch, KVLayout, RequestKey, SamplingParams, ScheduledSequence, Sequence

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")


def scheduled(computed: int, num_tokens: int, known: int, blocks: list[int]) -> ScheduledSequence:
    sequence = Sequence(RequestKey("r", 0), 0, 1, SamplingParams(max_tokens=9), list(range(100, 100 + known)), known)
    sequence.num_computed_tokens, sequence.block_table = computed, blocks
    return ScheduledSequence(sequence, num_tokens)


def planned(*items: ScheduledSequence) -> TritonPlan[np.ndarray]:
    return plan_triton(Batch(items), LAYOUT, num_blocks=20)


def test_rows_that_decode_come_before_chunks() -> None:
    plan = planned(scheduled(3, 3, 6, [7, 9, 1]), scheduled(9, 1, 10, [3, 2, 8]), scheduled(4, 2, 9, [5, 6]))
    assert plan.token_ids.tolist() == [109, 103, 104, 105, 104, 105]
    assert plan.positions.tolist() == [9, 3, 4, 5, 4, 5]
    assert plan.slots.tolist() == [8 * 4 + 1, 7 * 4 + 3, 9 * 4, 9 * 4 + 1, 6 * 4, 6 * 4 + 1]
    assert plan.sampled_rows.tolist() == [3, 0]  # the last sequence has more to come
    assert plan.begun_blocks.tolist() == [9, 6]
    assert plan.decode_tables.tolist() == [[3, 2, 8]]
    assert plan.decode_counts.tolist() == [10]
    assert plan.chunk_tables.tolist() == [[7, 9], [5, 6]]
    assert plan.chunk_counts.tolist() == [6, 6]
    assert plan.chunk_starts.tolist() == [0, 3, 5]
    assert plan.max_queries == 3


def test_rows_are_added_that_keep_nothing_and_see_nothing() -> None:
    plan = padded(planned(scheduled(9, 1, 10, [3, 2, 8]), scheduled(0, 1, 1, [4])), num_rows=4, num_blocks=5)
    assert plan.token_ids.tolist() == [109, 100, 0, 0]
    assert plan.slots.tolist() == [33, 16, -1, -1]
    assert plan.decode_counts.tolist() == [10, 1, 0, 0]
    assert plan.decode_tables.tolist() == [[3, 2, 8, 0, 0], [4, 0, 0, 0, 0], [0] * 5, [0] * 5]


def test_larger_plans_are_not_padded() -> None:
    for rows, blocks in ((0, 3), (1, 2)):
        with pytest.raises(ValueError, match="do not fit"):
            padded(planned(scheduled(9, 1, 10, [3, 2, 8])), rows, blocks)


def test_types_are_those_that_the_kernels_take() -> None:
    for plan in (planned(scheduled(9, 1, 10, [3, 2, 8])), planned(scheduled(0, 2, 2, [1])), padding(2, 3)):
        on_cpu = with_arrays(plan, on_device(plan.arrays, torch.device("cpu")))
        for name in [field.name for field in dataclasses.fields(plan)][1:]:
            array, tensor = getattr(plan, name), getattr(on_cpu, name)
            assert tensor.dtype == (torch.int32 if name.startswith(("decode", "chunk")) else torch.int64)
            assert tensor.tolist() == array.tolist()
            assert tensor.data_ptr() % 16 == 0
        assert on_cpu.max_queries == plan.max_queries


def test_arrays_are_filled_in_their_place() -> None:
    first: list[np.ndarray] = [np.arange(3), np.ones((2, 2), np.float64), np.zeros((0, 4), np.int32), np.array([True])]
    arrays = DeviceArrays(first, torch.device("cpu"))
    arrays.fill(first)
    places = [tensor.data_ptr() for tensor in arrays.tensors]
    assert [tensor.tolist() for tensor in arrays.tensors] == [array.tolist() for array in first]
    second: list[np.ndarray] = [-first[0], 2.5 * first[1].T, first[2], ~first[3]]
    arrays.fill(second)
    assert [tensor.tolist() for tensor in arrays.tensors] == [array.tolist() for array in second]
    assert [tensor.data_ptr() for tensor in arrays.tensors] == places
    with pytest.raises(ValueError, match="is no"):
        arrays.fill([np.arange(4), *second[1:]])
