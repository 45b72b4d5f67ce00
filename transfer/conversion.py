"""KV blocks of one size made into blocks of another, where one size is a multiple of the other."""

import numpy as np
import numpy.typing as npt

from kvrelay.transfer.protocol.lease import Place
from kvrelay.transfer.protocol.piece import Payload
from kvrelay.types import KVLayout


def convert(payload: Payload, block_size: int, place: Place, blocks: Payload, layout: KVLayout) -> bytes:
    """What is to lie in the blocks of a place once a piece has arrived there.

    payload is `[n, 2, num_kv_heads, block_size, row_bytes]`, blocks and the result are
    `[len(place.block_ids), 2, num_kv_heads, layout.block_size, row_bytes]`: what lies there now, and then. Tokens that
    the place has no block for are left out; they are none of the prompt. Behind the prompt's end there are zeros.
    """
    source, target = _by_token(payload, block_size, layout), _by_token(blocks, layout.block_size, layout)
    count = min(source.shape[1], target.shape[1] - place.offset)
    target[:, place.offset : place.offset + count] = source[:, :count]
    if place.is_end:
        target[:, place.offset + count :] = 0
    rows, _, width = target.shape
    return target.reshape(rows, -1, layout.block_size, width).transpose(1, 0, 2, 3).tobytes()


def _by_token(blocks: Payload, block_size: int, layout: KVLayout) -> npt.NDArray[np.uint8]:
    """A copy as `[2 * num_kv_heads, tokens, bytes of one head]`."""
    rows, width = 2 * layout.num_kv_heads, layout.row_bytes
    by_block = np.frombuffer(blocks, np.uint8).reshape(-1, rows, block_size, width)
    return by_block.transpose(1, 0, 2, 3).reshape(rows, len(by_block) * block_size, width).copy()
