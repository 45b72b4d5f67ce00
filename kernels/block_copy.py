"""Packs KV blocks that lie anywhere in a layer one after the other, and puts them back: plain torch, and the choice.

Both copy bytes and know nothing of what they mean, so that every bit arrives, of NaN too.
"""

import torch

from kvrelay.kernels.launch import HAS_TRITON, takes_triton

if HAS_TRITON:
    from kvrelay.kernels import block_copy_triton


def gather_blocks(layer: torch.Tensor, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """`packed[i] = layer[block_ids[i]]`, on the current stream of their device.

    layer `[num_blocks, block_bytes]` and packed `[n, block_bytes]`, uint8 and contiguous; block_ids `[n]`, int64. The
    ids are not checked: on a GPU what does not exist is read all the same.

    Raises ValueError if the shapes or types are others.
    """
    check_blocks(layer, block_ids, packed)
    if takes_triton(layer):
        block_copy_triton.gather(layer, block_ids, packed)
    else:
        torch.index_select(layer, 0, block_ids, out=packed)


def scatter_blocks(packed: torch.Tensor, block_ids: torch.Tensor, layer: torch.Tensor) -> None:
    """`layer[block_ids[i]] = packed[i]`, and nothing else is written. As `gather_blocks`; ids must not repeat.

    Raises ValueError if the shapes or types are others.
    """
    check_blocks(layer, block_ids, packed)
    if takes_triton(layer):
        block_copy_triton.scatter(packed, block_ids, layer)
    else:
        layer.index_copy_(0, block_ids, packed)


def check_blocks(layer: torch.Tensor, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Raises ValueError if these cannot be a layer, some of its blocks and their bytes."""
    types = (layer.dtype, block_ids.dtype, packed.dtype) == (torch.uint8, torch.int64, torch.uint8)
    places = len({layer.device, block_ids.device, packed.device}) == 1
    shapes = layer.dim() == 2 and packed.shape == (*block_ids.shape, layer.shape[1])
    if not (types and places and shapes and layer.is_contiguous() and packed.is_contiguous()):
        raise ValueError(
            f"A layer of {_described(layer)}, ids of {_described(block_ids)} and bytes of {_described(packed)} do not "
            "fit together; expected uint8 [num_blocks, block_bytes], int64 [n] and uint8 [n, block_bytes], contiguous "
            "and on one device."
        )


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
