"""A digest of bytes that lie on a device, so that they need not come to the host to be checked: torch, and the choice.

Each 32-bit word, with its place in the high half, goes through the finalizer of splitmix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014; constants of David Stafford's Mix13), and all of them are
added modulo 2**64. So the sum is the same in whatever order it is made. The finalizer loses nothing: one changed word
always changes the sum, and any other damage goes unnoticed once in 2**64 times. It is no defence against forgery.
"""

import torch

from kvrelay.kernels.launch import HAS_TRITON, takes_triton

if HAS_TRITON:
    from kvrelay.kernels import digest_triton

WORD_BYTES = 4
# (shift, factor) of each round but the last, which only shifts; factors as torch's signed integers.
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31


def digest_bytes(content: torch.Tensor, out: torch.Tensor) -> None:
    """Puts the digest of `content` into `out`, on the current stream of their device.

    content `[n]`, uint8 and contiguous, of whole words that begin at one; out `[1]`, int64.

    Raises ValueError if the shapes or types are others.
    """
    _check(content, out)
    words = content.view(torch.int32)
    if takes_triton(content):
        digest_triton.digest(words, out)
    else:
        places = torch.arange(len(words), dtype=torch.int64) << 32
        out.copy_(_mixed(words.to(torch.int64) & 0xFFFFFFFF | places).sum(0, keepdim=True))


def _mixed(states: torch.Tensor) -> torch.Tensor:
    for shift, factor in _ROUNDS:
        states = (states ^ _shifted(states, shift)) * factor
    return states ^ _shifted(states, _LAST_SHIFT)


def _shifted(states: torch.Tensor, shift: int) -> torch.Tensor:
    """To the right, without the copies of the sign that torch shifts in."""
    return states >> shift & (1 << 64 - shift) - 1


def _check(content: torch.Tensor, out: torch.Tensor) -> None:
    types = (content.dtype, out.dtype, content.device) == (torch.uint8, torch.int64, out.device)
    shapes = content.dim() == 1 and out.shape == (1,) and content.is_contiguous() and len(content) % WORD_BYTES == 0
    if not (types and shapes and content.data_ptr() % WORD_BYTES == 0):
        raise ValueError(
            f"There is no digest of {content.dtype} {list(content.shape)} on {content.device} into {out.dtype} "
            f"{list(out.shape)} on {out.device}; expected uint8 [n], contiguous words of {WORD_BYTES} bytes, and int64 "
            "[1] on one device."
        )
