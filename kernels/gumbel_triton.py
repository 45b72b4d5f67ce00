"""The Triton kernels behind `gumbel`: what a row keeps of its vocabulary, the best token of each tile, the best.

Probabilities are not sorted. A float32 logit has the order of an unsigned number of 32 bits, its *key*, and the least
key that top-k, top-p or min-p keep is found bit by bit, from the highest: with how many, or with how much of the
probability, would all keys from here up come out? Each question is one pass over the row by one program.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_SCANNED = 4096
_PICKED = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _key(logits: tl.tensor) -> tl.tensor:
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True).to(tl.int64)  # -0 is no less than 0
    return tl.where(bits < 0, -1 - bits, bits + 0x80000000)


@triton.jit  # type: ignore[untyped-decorator]
def _logit(key: tl.tensor) -> tl.tensor:
    bits = tl.where(key < 0x80000000, -1 - key, key - 0x80000000)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _weight(logits: tl.tensor, top: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Probabilities, the largest taken as 1, in float32, to be summed in float64."""
    return tl.exp((logits - top) * inverse).to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator]
def _mass(
    row: tl.tensor, vocab: tl.tensor, least: tl.tensor, top: tl.tensor, inverse: tl.tensor, width: tl.constexpr
) -> tl.tensor:
    """The sum of the probabilities of all keys from `least` on."""
    total = tl.zeros((1,), tl.float64)
    for start in range(0, vocab, width):
        token = start + tl.arange(0, width)
        logits = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        total += tl.sum(tl.where(_key(logits) >= least, _weight(logits, top, inverse), 0.0), 0)
    return tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _count(row: tl.tensor, vocab: tl.tensor, least: tl.tensor, width: tl.constexpr) -> tl.tensor:
    """How many keys there are from `least` on."""
    total = tl.zeros((1,), tl.int32)
    for start in range(0, vocab, width):
        token = start + tl.arange(0, width)
        logits = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        total += tl.sum(((_key(logits) >= least) & (token < vocab)).to(tl.int32), 0)
    return tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator]
def limits_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    tops: tl.tensor,
    edges: tl.tensor,
    last_ids: tl.tensor,
    vocab: tl.tensor,
    width: tl.constexpr,
) -> None:
    """Program n finds row n's largest logit, the least key that stays, and the last id that stays with that key."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * vocab
    best = tl.full((1,), float("-inf"), tl.float32)
    unknown = tl.zeros((1,), tl.int32)
    for start in range(0, vocab, width):
        token = start + tl.arange(0, width)
        found = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        unknown += tl.sum((found != found).to(tl.int32), 0)
        best = tl.maximum(best, tl.max(tl.where(found == found, found, float("-inf")), 0))
    top = tl.max(best, 0)
    tl.store(tops + number, tl.where(tl.sum(unknown, 0) > 0, float("nan"), top))
    heat = tl.load(temperature + number)
    k, p, least_p = tl.load(top_k + number), tl.load(top_p + number), tl.load(min_p + number)
    edge = tl.zeros((), tl.int64)
    last_id = vocab
    usable = (heat > 0.0) & (top > float("-inf")) & (top < float("inf")) & (tl.sum(unknown, 0) == 0)
    if usable:
        # As float32 it stays finite, so that the largest logit has the score 0 at any temperature.
        inverse = tl.minimum(1.0 / heat, 3.0e38).to(tl.float32)
        if least_p > 0.0:
            floor = tl.log(least_p)
            below = tl.zeros((), tl.int64)  # becomes the largest key that is too unlikely
            for bit in range(32):
                tried = below | (tl.full((), 1, tl.int64) << (31 - bit))
                score = (_logit(tried).to(tl.float64) - top.to(tl.float64)) / heat
                below = tl.where(score < floor, tried, below)
            edge = below + 1
        if (k > 0) & (k < vocab):
            kept = tl.zeros((), tl.int64)  # becomes the k-th largest key; all that equal it stay
            for bit in range(32):
                tried = kept | (tl.full((), 1, tl.int64) << (31 - bit))
                kept = tl.where(_count(row, vocab, tried, width) >= k, tried, kept)
            edge = tl.maximum(edge, kept)
        if p < 1.0:
            wanted = p * _mass(row, vocab, edge, top, inverse, width)
            kept = tl.zeros((), tl.int64)  # becomes the key whose tokens reach top_p
            for bit in range(32):
                tried = kept | (tl.full((), 1, tl.int64) << (31 - bit))
                enough = _mass(row, vocab, tl.maximum(tried, edge), top, inverse, width) >= wanted
                kept = tl.where(enough, tried, kept)
            edge = tl.minimum(tl.maximum(edge, kept), _key(top))  # at least the best stays, even of a top_p of 0
            missing = wanted - _mass(row, vocab, edge + 1, top, inverse, width)
            each = tl.maximum(_weight(_logit(edge), top, inverse), 1e-300)
            num_kept = tl.maximum(tl.ceil(missing / each), 1.0)
            before = tl.zeros((1,), tl.int32)
            last = tl.full((1,), -1, tl.int32)
            for start in range(0, vocab, width):
                token = start + tl.arange(0, width)
                found = tl.load(row + token, mask=token < vocab, other=float("-inf"))
                equal = ((_key(found) == edge) & (token < vocab)).to(tl.int32)
                rank = before + tl.cumsum(equal, 0)
                stays = (equal > 0) & (rank <= num_kept)
                last = tl.maximum(last, tl.max(tl.where(stays, token, -1), 0))
                before += tl.sum(equal, 0)
            last_id = tl.max(last, 0)
    tl.store(edges + number, edge)
    tl.store(last_ids + number, last_id)


@triton.jit  # type: ignore[untyped-decorator]
def _philox(counter: tl.tensor, index: tl.tensor, seed: tl.tensor, sample: tl.tensor):  # type: ignore[no-untyped-def]
    """Philox4x64-10 of the counters (counter, index, 0, 0) under the key (seed, sample), all uint64."""
    a, b = counter, index + counter * 0
    c, d = counter * 0, counter * 0
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(a, c * 0 + 0xD2E7470EE14C6C93), a * 0xD2E7470EE14C6C93
        high_c, low_c = tl.umulhi(c, c * 0 + 0xCA5A826395121157), c * 0xCA5A826395121157
        a, b, c, d = high_c ^ b ^ seed, low_c, high_a ^ d ^ sample, low_a
        seed += 0x9E3779B97F4A7C15
        sample += 0xBB67AE8584CAA73B
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator]
def pick_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    samples: tl.tensor,
    indexes: tl.tensor,
    tops: tl.tensor,
    edges: tl.tensor,
    last_ids: tl.tensor,
    scores: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.tensor,
    width: tl.constexpr,
) -> None:
    """Program (i, n) finds the best of `width` tokens of row n, the first of equal ones, and its score."""
    tile, number = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tile * width + tl.arange(0, width)
    found = tl.load(logits + number * vocab + token, mask=token < vocab, other=float("-inf"))
    heat, top = tl.load(temperature + number), tl.load(tops + number)
    edge, last_id = tl.load(edges + number), tl.load(last_ids + number)
    score = found.to(tl.float64)
    if heat > 0.0:
        counter = (tile * (width // 4) + tl.arange(0, width // 4) + 1).to(tl.uint64)
        seed, sample = tl.load(seeds + number).to(tl.uint64), tl.load(samples + number).to(tl.uint64)
        a, b, c, d = _philox(counter, tl.load(indexes + number).to(tl.uint64), seed, sample)
        words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        uniform = ((words >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        score = (score - top.to(tl.float64)) / heat - tl.log(-tl.log(uniform))
        key = _key(found)
        score = tl.where((key > edge) | ((key == edge) & (token <= last_id)), score, float("-inf"))
    best = tl.max(score, 0)
    place = number * tl.num_programs(0) + tile
    tl.store(scores + place, best)
    tl.store(tokens + place, tl.min(tl.where((score == best) & (token < vocab), token, vocab), 0))


@triton.jit  # type: ignore[untyped-decorator]
def choose_kernel(
    tops: tl.tensor, scores: tl.tensor, tokens: tl.tensor, out: tl.tensor, num_tiles: tl.tensor, width: tl.constexpr
) -> None:
    """Program n chooses among the tiles of row n; -1 if its largest logit is no finite number."""
    number = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, width)
    score = tl.load(scores + number * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    token = tl.load(tokens + number * num_tiles + tile, mask=tile < num_tiles, other=0x7FFFFFFF)
    chosen = tl.min(tl.where(score == tl.max(score, 0), token, 0x7FFFFFFF), 0)
    top = tl.load(tops + number)
    finite = (top > float("-inf")) & (top < float("inf"))
    tl.store(out + number, tl.where(finite, chosen, -1).to(tl.int64))


def sample(logits: torch.Tensor, sampling: Any, out: torch.Tensor) -> None:
    """See `gumbel.sample_tokens`, which has checked all of these."""
    num_rows, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, _PICKED)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    tops, edges, last_ids = empty(torch.float32), empty(torch.int64), empty(torch.int32)
    scores, tokens = empty(torch.float64, num_tiles), empty(torch.int32, num_tiles)
    limits_kernel[(num_rows,)](
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, tops, edges, last_ids, vocab,
        width=_SCANNED, enable_fp_fusion=False, num_warps=16,
    )  # fmt: skip
    pick_kernel[(num_tiles, num_rows)](
        logits, sampling.temperature, sampling.seeds, sampling.samples, sampling.indexes, tops, edges, last_ids,
        scores, tokens, vocab, width=_PICKED, enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    choose_kernel[(num_rows,)](
        tops, scores, tokens, out, num_tiles,
        width=triton.next_power_of_2(num_tiles), enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
