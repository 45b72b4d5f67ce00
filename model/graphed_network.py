"""Decode steps on a GPU as graphs: recorded once at start, for some sizes, and replayed by one call each.

A step is filled up to the next size with rows that keep no KV and attend over nothing. Since no kernel lets a row
depend on others, its bits are those of a step that is not recorded, and any step that fits no size is one.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.model.config import ModelConfig
from kvrelay.model.device_arrays import DeviceArrays
from kvrelay.model.forward import ForwardPass
from kvrelay.model.kv_cache import KVCache
from kvrelay.model.triton_network import TritonNetwork
from kvrelay.model.triton_plan import TritonPlan, padded, padding, plan_triton, with_arrays
from kvrelay.types import Batch

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function queues on the device, and gives what queues the same again, on the same memory."""

_FIRST_CONTEXT = 2048  # positions; programs of splits that no row has cost little up to the next size
_NEXT_CONTEXT = 4  # times as many


class CudaCapture:
    """Records CUDA graphs, all in one pool of memory, since only one of them runs at a time."""

    def __init__(self) -> None:
        """Raises RuntimeError if torch sees no GPU."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Replay:
        """See `Capture`. Calls the function once before, which compiles its kernels."""
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):  # which waits for what is queued
            function()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step of one size, with the memory that it reads."""

    arrays: DeviceArrays
    begun_blocks: torch.Tensor
    replay: Replay


class GraphedNetwork:
    """A TritonNetwork over one KV cache. See `forward.Network`."""

    def __init__(self, network: TritonNetwork, kv_cache: KVCache, max_rows: int, capture: Capture) -> None:
        """Records steps of up to `max_rows` sequences, the largest first, whose memory the others find free."""
        self._network = network
        self._kv_cache = kv_cache
        self._row_sizes = row_sizes(max_rows)
        self._table_sizes = table_sizes(network.config.max_model_len, kv_cache.layout.block_size)
        with torch.inference_mode():
            self._logits = torch.empty((max_rows, network.config.vocab_size), device=network.device)
            self._recorded = {
                (rows, blocks): self._record(rows, blocks, capture)
                for rows in reversed(self._row_sizes)
                for blocks in reversed(self._table_sizes)
            }

    @property
    def config(self) -> ModelConfig:
        """See `forward.Network`."""
        return self._network.config

    @property
    def device(self) -> torch.device:
        """See `forward.Network`."""
        return self._network.device

    @property
    def weights(self) -> str:
        """See `forward.Network`."""
        return self._network.weights

    def begin(self, batch: Batch, kv_cache: KVCache) -> ForwardPass:
        """See `forward.Network`."""
        plan = plan_triton(batch, kv_cache.layout, kv_cache.num_blocks)
        size = self._size(plan)
        if size is None or kv_cache is not self._kv_cache:
            return self._network.begin_planned(plan, kv_cache)
        recorded = self._recorded[size]
        recorded.arrays.fill(padded(plan, *size).arrays)
        if len(plan.begun_blocks):  # see `kv_cache`
            kv_cache.tensor.index_fill_(1, recorded.begun_blocks[: len(plan.begun_blocks)], 0)
        return ReplayedPass(recorded.replay, self._logits[: len(plan.token_ids)])

    def _size(self, plan: TritonPlan[np.ndarray]) -> tuple[int, int] | None:
        """The smallest recorded rows and blocks of tables that hold a step; None if there are none."""
        num_rows, num_blocks = plan.decode_tables.shape
        rows, blocks = bisect_left(self._row_sizes, num_rows), bisect_left(self._table_sizes, num_blocks)
        fits = rows < len(self._row_sizes) and blocks < len(self._table_sizes)
        if not fits or len(plan.chunk_counts) or len(plan.sampled_rows) < num_rows:
            return None
        return self._row_sizes[rows], self._table_sizes[blocks]

    def _record(self, num_rows: int, num_blocks: int, capture: Capture) -> _Recorded:
        plan = padding(num_rows, num_blocks)
        arrays = DeviceArrays(plan.arrays, self.device)
        arrays.fill(plan.arrays)
        on_device, kv, logits = with_arrays(plan, arrays.tensors), self._kv_cache.tensor, self._logits[:num_rows]

        def step() -> None:
            residual = self._network.embed(on_device.token_ids)
            for layer in range(self.config.num_layers):
                self._network.compute(layer, residual, on_device, kv[layer])
            self._network.logits_into(residual, logits)

        return _Recorded(arrays, on_device.begun_blocks, capture(step))


@dataclass(frozen=True, slots=True)
class ReplayedPass:
    """See `forward.ForwardPass`. What is computed is all queued with the first layer."""

    replay: Replay
    recorded_logits: torch.Tensor

    def compute(self, layer: int) -> None:
        """The next layer."""
        if layer == 0:
            self.replay()

    def logits(self) -> torch.Tensor:
        """float32 `[rows, vocab]`, until the next step is replayed."""
        return self.recorded_logits


def row_sizes(max_rows: int) -> list[int]:
    """Powers of two, and the largest."""
    return sorted({min(1 << power, max_rows) for power in range(max_rows.bit_length() + 1)})


def table_sizes(max_model_len: int, block_size: int) -> list[int]:
    """Blocks of contexts that are each some times as long as the one before, up to the longest."""
    sizes, context = [], _FIRST_CONTEXT
    while context < max_model_len:
        sizes.append(-(-context // block_size))
        context *= _NEXT_CONTEXT
    return [*sizes, -(-max_model_len // block_size)]
