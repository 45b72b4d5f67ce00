"""A whole decoder layer in one native call, over packed weights and a paged KV cache.

It is made of the kernels of `linear`, `attention` and `pointwise`, each of which has its plain twin there.
"""

import ctypes
from dataclasses import dataclass

import torch

from kvrelay.kernels.attention import KV_TYPES, PagedRows
from kvrelay.kernels.linear import FORM_NUMBERS
from kvrelay.kernels.linear_packing import PackedWeights
from kvrelay.kernels.native_library import NativeLibrary
from kvrelay.kernels.pointwise import WrittenRows


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norms and biases are float32, contiguous and on the CPU."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: PackedWeights
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim], of every head
    k_norm: torch.Tensor | None
    output: PackedWeights
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: PackedWeights
    down: PackedWeights


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How the columns of qkv are divided, and the epsilon of every norm."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("form", ctypes.c_int64),
        ("tiles", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, weights: PackedWeights, bias: torch.Tensor | None) -> "_Matrix":
        return cls(
            FORM_NUMBERS[weights.form], weights.tiles.data_ptr(), _address(bias), weights.outputs, weights.columns
        )


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("residual", "cos", "sin", "positions", "slots", "begun"),
                *("row_offsets", "starts", "table_offsets", "block_ids", "scratch"),
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_rows", "num_begun", "num_sequences", "num_heads", "num_kv_heads", "head_dim", "block_size"),
                *("kv_type", "threads"),
            )
        ),
        ("eps", ctypes.c_float),
    ]


class DecoderLayers:
    """All layers of a network on native kernels, `num_threads` at a time."""

    def __init__(
        self,
        native: NativeLibrary,
        num_threads: int,
        layers: tuple[LayerWeights, ...],
        heads: HeadShape,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """cos and sin are float32 `[num_positions, head_dim]`: see `RotaryEmbedding`."""
        self._compute = native.function("kvrelay_decoder_layer", "ppp")
        self._scratch_bytes = native.function("kvrelay_decoder_scratch_bytes", "ppp")
        self._num_threads = num_threads
        self._weights = layers  # what the addresses below point to
        self._layers = [_layer(weights) for weights in layers]
        self._heads = heads
        self._cos, self._sin = cos, sin

    def begin(self, residual: torch.Tensor, read: PagedRows, written: WrittenRows, kv: torch.Tensor) -> "StepUnderWay":
        """A step over `residual`, float32 `[N, hidden]`, which every layer adds to in its place.

        `read` and `written` are the same N rows. kv is the whole cache, `[num_layers, num_blocks, 2, num_kv_heads,
        block_size, head_dim]`, bfloat16 or float32, or int8 with rows as `quantize_kv` gives them. Positions, slots and
        blocks must exist: they are not checked here.
        """
        step = _Step(
            residual.data_ptr(),
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            written.positions.data_ptr(),
            written.slots.data_ptr(),
            written.begun.data_ptr(),
            read.row_offsets.data_ptr(),
            read.starts.data_ptr(),
            read.table_offsets.data_ptr(),
            read.block_ids.data_ptr(),
            None,
            len(residual),
            len(written.begun),
            len(read.starts),
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            read.block_size,
            KV_TYPES[kv.dtype],
            self._num_threads,
            self._heads.eps,
        )
        num_bytes = ctypes.c_int64()
        self._scratch_bytes(ctypes.byref(self._layers[0]), ctypes.byref(step), ctypes.byref(num_bytes))
        scratch = torch.empty(num_bytes.value, dtype=torch.uint8)
        step.scratch = scratch.data_ptr()
        return StepUnderWay(step, residual, read, written, kv, scratch)

    def compute(self, layer: int, step: "StepUnderWay") -> None:
        """The next layer: its KV of the step goes into the cache, and what it gives is added to the residual."""
        self._compute(ctypes.byref(self._layers[layer]), ctypes.byref(step.addresses), step.kv[layer].data_ptr())


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """Addresses for the native code, and the tensors that they point into."""

    addresses: _Step
    residual: torch.Tensor
    read: PagedRows
    written: WrittenRows
    kv: torch.Tensor
    scratch: torch.Tensor


def _layer(weights: LayerWeights) -> _Layer:
    return _Layer(
        _Matrix.of(weights.qkv, weights.qkv_bias),
        _Matrix.of(weights.output, weights.output_bias),
        _Matrix.of(weights.gate_up, None),
        _Matrix.of(weights.down, None),
        weights.attention_norm.data_ptr(),
        weights.mlp_norm.data_ptr(),
        _address(weights.q_norm),
        _address(weights.k_norm),
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
