"""The Triton kernel behind `digest`: programs add up the digest of a few thousand words each, ending in any order."""

import torch
import triton
import triton.language as tl

_PROGRAM_WORDS = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _added(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """Of ours, since that of Triton is not interpreted where only this module is."""
    return left + right


@triton.jit  # type: ignore[untyped-decorator]
def digest_kernel(words: tl.tensor, out: tl.tensor, num_words: tl.tensor, width: tl.constexpr) -> None:
    """Program i adds the mixed words from `i * width` on to `out`, which begins with 0."""
    places = tl.program_id(0) * width + tl.arange(0, width)
    inside = places < num_words
    found = tl.load(words + places, mask=inside, other=0).to(tl.uint32, bitcast=True)
    state = found.to(tl.uint64) | (places.to(tl.uint64) << 32)
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    total = tl.reduce(tl.where(inside, state, 0).to(tl.int64, bitcast=True), 0, _added)
    tl.atomic_add(out, total, sem="relaxed")


def digest(words: torch.Tensor, out: torch.Tensor, width: int = _PROGRAM_WORDS) -> None:
    """See `digest.digest_bytes`; words `[n]`, int32. `width` is how many of them a program takes, a power of two."""
    out.zero_()
    if len(words):
        digest_kernel[(triton.cdiv(len(words), width),)](words, out, len(words), width=width, enable_fp_fusion=False)
