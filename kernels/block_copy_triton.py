"""The Triton kernels behind `block_copy`: rows of bytes, copied as the widest words that they are whole multiples of.

One program copies `_PROGRAM_BYTES` of one block at most, so that a few blocks already keep a whole GPU's memory busy.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_PROGRAM_BYTES = 8192


@triton.jit  # type: ignore[untyped-decorator]
def gather_kernel(
    layer: tl.tensor, block_ids: tl.tensor, packed: tl.tensor, num_words: tl.tensor, width: tl.constexpr
) -> None:
    """Program (i, j) copies words `j * width` onwards of block `block_ids[i]` to row i of `packed`."""
    row = tl.program_id(0).to(tl.int64)  # a row's first word is beyond 32 bits in a large cache
    block = tl.load(block_ids + row)
    words = tl.program_id(1) * width + tl.arange(0, width)
    inside = words < num_words
    found = tl.load(layer + block * num_words + words, mask=inside)
    tl.store(packed + row * num_words + words, found, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def scatter_kernel(
    packed: tl.tensor, block_ids: tl.tensor, layer: tl.tensor, num_words: tl.tensor, width: tl.constexpr
) -> None:
    """Program (i, j) copies words `j * width` onwards of row i of `packed` to block `block_ids[i]`."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids + row)
    words = tl.program_id(1) * width + tl.arange(0, width)
    inside = words < num_words
    found = tl.load(packed + row * num_words + words, mask=inside)
    tl.store(layer + block * num_words + words, found, mask=inside)


def gather(layer: torch.Tensor, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """See `block_copy.gather_blocks`, which has checked all of these."""
    _launch(gather_kernel, layer, block_ids, packed)


def scatter(packed: torch.Tensor, block_ids: torch.Tensor, layer: torch.Tensor) -> None:
    """See `block_copy.scatter_blocks`, which has checked all of these."""
    _launch(scatter_kernel, packed, block_ids, layer)


def _launch(kernel: Any, source: torch.Tensor, block_ids: torch.Tensor, target: torch.Tensor) -> None:
    word_bytes = _word_bytes(source, target)
    words = [tensor.view(_WORDS[word_bytes]) for tensor in (source, target)]
    num_words, width = words[0].shape[1], _PROGRAM_BYTES // word_bytes
    grid = (len(block_ids), triton.cdiv(num_words, width))  # where it is empty, nothing is launched
    kernel[grid](words[0], block_ids, words[1], num_words, width=width, enable_fp_fusion=False)


def _word_bytes(*tensors: torch.Tensor) -> int:
    """The largest word that rows, addresses and places in their storage are multiples of."""
    places = [(tensor.shape[1], tensor.data_ptr(), tensor.storage_offset()) for tensor in tensors]
    return math.gcd(max(_WORDS), *(number for place in places for number in place))
