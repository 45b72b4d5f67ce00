"""Paged attention: close to its twin, and of the same bits however its rows are put together."""

import itertools

import pytest
import torch

from kvrelay.kernels.attention import AttentionKernel, PagedRows, attend_plain
from kvrelay.kernels.native_library import NativeLibrary
from kvrelay.kernels.quantized_kv import dequantize_kv, quantize_kv

# num_heads, num_kv_heads, head_dim, block_size: the bundled model; odd everything; no sharing; a group wider than a
# product's rows; a width that fills no whole vector; the widest.
SHAPES = [(9, 3, 64, 16), (3, 1, 7, 5), (4, 4, 16, 8), (14, 2, 24, 32), (8, 8, 80, 64), (2, 1, 256, 16)]
DTYPES = [torch.float32, torch.bfloat16]
KV_DTYPES = [*DTYPES, torch.int8]
# First position and the one after the last: alone at the beginning and around the edges of tiles, chunks that begin
# and end anywhere, one that is cut into several tasks.
SPANS = [(0, 1), (5, 6), (62, 63), (63, 64), (64, 65), (199, 200), (0, 70), (37, 131), (128, 192), (300, 303)]


class Case:
    """Random queries and KV of sequences whose blocks lie anywhere; all of the cache that is not theirs is NaN.

    In int8 that is codes of 127 that are worth NaN.
    """

    def __init__(
        self, spans: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype, block_size: int = 0
    ) -> None:
        num_heads, num_kv_heads, head_dim, self.block_size = (*shape[:3], block_size or shape[3])
        generator = torch.Generator().manual_seed(7)
        self.spans = spans
        self.kv = []
        self.queries = []
        for _, stop in spans:
            self.kv.append(in_cache(torch.randn(2, num_kv_heads, stop, head_dim, generator=generator), dtype))
            self.queries.append(torch.randn(stop, num_heads, head_dim, generator=generator))
        lengths = [-(-stop // self.block_size) for _, stop in spans]
        blocks = torch.randperm(sum(lengths) + 3, generator=generator).tolist()
        ends = list(itertools.accumulate(lengths, initial=0))
        self.tables = [blocks[first:last] for first, last in itertools.pairwise(ends)]
        self.cache = in_cache(
            torch.full((len(blocks), 2, num_kv_heads, self.block_size, head_dim), float("nan")), dtype
        )
        if dtype == torch.int8:
            self.cache[..., :head_dim] = 127
        for kv, table in zip(self.kv, self.tables, strict=True):
            for index, block in enumerate(table):
                part = kv[:, :, index * self.block_size : (index + 1) * self.block_size]
                self.cache[block, :, :, : part.shape[2]] = part

    def rows(self, spans: dict[int, tuple[int, int]]) -> PagedRows:
        """Rows of some of the sequences."""
        tables = [self.tables[index] for index in spans]
        return PagedRows.build(list(spans.values()), tables, self.block_size, len(self.cache))

    def query(self, spans: dict[int, tuple[int, int]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Their queries."""
        return torch.cat([self.queries[index][start:stop] for index, (start, stop) in spans.items()]).to(dtype)

    def attend(
        self, native: NativeLibrary, spans: dict[int, tuple[int, int]], num_threads: int = 1
    ) -> list[torch.Tensor]:
        """The result of each sequence."""
        result = AttentionKernel(native, num_threads)(self.query(spans), self.cache, self.rows(spans), torch.float32)
        return list(torch.split(result, [stop - start for start, stop in spans.values()]))


def in_cache(kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As it lies in a cache of this type."""
    return quantize_kv(kv) if dtype == torch.int8 else kv.to(dtype)


def tolerance(kv: torch.dtype, result: torch.dtype) -> float:
    """Absolute, for values of about 1: what a weight's and the result's rounding do to a mean of values below 4.5.

    The kernel's float32 scores are off by some 1e-6, so a weight may be rounded to the other neighbour in bfloat16.
    With KV in int8 up to 64 weights of a tile are rounded to 32767ths of the largest.
    """
    of_weights = {torch.float32: 8e-6, torch.bfloat16: 4.5 * 2**-9, torch.int8: 4.5 * 64 * 2**-16}[kv]
    return of_weights + {torch.float32: 0.0, torch.bfloat16: 4.5 * 2**-9}[result]


def as_multiplied(query: torch.Tensor, kv: torch.dtype, native: NativeLibrary) -> torch.Tensor:
    """What the kernel rounds queries to, as far as its twin does not."""
    if kv == torch.int8 and "avx512_vnni" in native.level.cpu_flags:
        return dequantize_kv(quantize_kv(query))
    return query


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_the_twin(
    native: NativeLibrary, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """And reads nothing behind a sequence's last position, where the cache is NaN."""
    case = Case(SPANS, shape, dtype)
    spans = dict(enumerate(SPANS))
    for query_type, result_type in itertools.product(DTYPES, DTYPES):
        query, rows = case.query(spans, query_type), case.rows(spans)
        result = AttentionKernel(native, 1)(query, case.cache, rows, result_type)
        rounded = as_multiplied(query, dtype, native)
        expected = attend_plain(rounded, case.cache.nan_to_num(), rows, torch.float32)
        assert result.dtype == result_type
        torch.testing.assert_close(result.float(), expected, rtol=0, atol=tolerance(dtype, result_type))


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_alone_and_among_others(
    native: NativeLibrary, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """In a whole prompt, in chunks that end anywhere, and as one decoding row; with one thread or two."""
    case = Case([(0, 211), (0, 90)], shape, dtype)
    whole = case.attend(native, {0: (0, 211), 1: (0, 90)})
    assert all(map(torch.equal, case.attend(native, {0: (0, 211), 1: (0, 90)}, num_threads=2), whole))
    for cuts in ([0, 1, 64, 65, 211], [0, 128, 211], [0, 50, 127, 193, 211]):
        for start, stop in itertools.pairwise(cuts):
            (chunk,) = case.attend(native, {0: (start, stop)})
            assert torch.equal(chunk, whole[0][start:stop])
    for position in (0, 1, 5, 62, 63, 64, 65, 89, 127, 128, 210):
        spans = {0: (position, position + 1), 1: (min(position, 89), min(position, 89) + 1)}
        alone = case.attend(native, spans)
        assert torch.equal(alone[0][0], whole[0][position])
        assert torch.equal(alone[1][0], whole[1][min(position, 89)])


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_many_decoding_rows_have_the_bits_of_each_alone(native: NativeLibrary, dtype: torch.dtype) -> None:
    """Many rows share tasks over the heads."""
    spans = [(start, start + 1) for start in (0, 63, 64, 100, 255, 17, 31, 90, 128, 300, 1, 2)]
    case = Case(spans, SHAPES[0], dtype)
    together = case.attend(native, dict(enumerate(spans)))
    threaded = case.attend(native, dict(enumerate(spans)), num_threads=2)
    for index, span in enumerate(spans):
        (alone,) = case.attend(native, {index: span})
        assert torch.equal(alone, together[index])
        assert torch.equal(alone, threaded[index])


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_block_size_does_not_matter(native: NativeLibrary, dtype: torch.dtype) -> None:
    """Nor where blocks lie."""
    spans = [(0, 1), (0, 201), (77, 78)]
    results = [
        Case(spans, SHAPES[0], dtype, size).attend(native, dict(enumerate(spans))) for size in (8, 16, 32, 64, 5)
    ]
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_scores_of_any_size_are_weighed(native: NativeLibrary) -> None:
    """The largest score may come first or last, and weights of others may be nothing."""
    case = Case([(0, 200)], SHAPES[0], torch.float32)
    case.queries[0] *= 200
    expected = attend_plain(case.query({0: (0, 200)}), case.cache.nan_to_num(), case.rows({0: (0, 200)}), torch.float32)
    (result,) = case.attend(native, {0: (0, 200)})
    # Scores are some hundreds, so that their rounding changes weights by some 2**-14.
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-3)


def test_what_is_not_a_number_stays_so(native: NativeLibrary) -> None:
    """So that a broken network is found at its logits."""
    case = Case([(0, 80), (0, 80)], SHAPES[0], torch.bfloat16)
    case.cache[case.tables[0][1], 1, 0, 3, 5] = float("nan")
    broken, sound = case.attend(native, {0: (79, 80), 1: (79, 80)})
    assert broken[0, 0, 5].isnan()
    assert sound.isfinite().all()


@pytest.mark.parametrize("part", [0, 1])
def test_codes_that_are_worth_not_a_number_break_the_rows_that_see_them(native: NativeLibrary, part: int) -> None:
    """Of keys or of values; rows before it see nothing of it."""
    case = Case([(0, 80)], SHAPES[0], torch.int8)
    position = 71  # of the rows that are multiplied together, some see it and some do not
    case.cache[case.tables[0][position // 16], part, 0, position % 16, -4:] = quantize_kv(torch.tensor([torch.nan]))[
        -4:
    ]
    (result,) = case.attend(native, {0: (0, 80)})
    assert result[:position].isfinite().all()
    assert result[position:, :3].isnan().all()
    assert result[:, 3:].isfinite().all()


def test_no_rows_are_no_result(native: NativeLibrary) -> None:
    """An empty call is not an error."""
    case = Case([(0, 1)], SHAPES[0], torch.float32)
    rows = PagedRows.build([], [], case.block_size, len(case.cache))
    assert AttentionKernel(native, 1)(torch.empty(0, 9, 64), case.cache, rows, torch.float32).shape == (0, 9, 64)


@pytest.mark.parametrize(
    ("spans", "table"), [((3, 3), [0]), ((-1, 2), [0]), ((0, 17), [0]), ((0, 17), [0, 4]), ((0, 17), [-1, 0])]
)
def test_rows_without_their_blocks_are_refused(spans: tuple[int, int], table: list[int]) -> None:
    """Native code would read whatever is there."""
    with pytest.raises(ValueError, match="expected at least one position"):
        PagedRows.build([spans], [table], 16, 4)


@pytest.mark.parametrize(
    "query",
    [
        torch.zeros(2, 9, 64),
        torch.zeros(1, 8, 64),
        torch.zeros(1, 9, 32),
        torch.zeros(1, 9, 64, dtype=torch.float16),
        torch.zeros(1, 64, 9).transpose(1, 2),
    ],
)
def test_other_tensors_are_refused(native: NativeLibrary, query: torch.Tensor) -> None:
    """By a sentence that says what was expected."""
    case = Case([(0, 1)], SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match="expected \\[N, num_heads"):
        AttentionKernel(native, 1)(query, case.cache, case.rows({0: (0, 1)}), torch.float32)


def test_codes_without_what_they_are_worth_are_refused(native: NativeLibrary) -> None:
    """Native code would read it behind them."""
    case = Case([(0, 1)], SHAPES[0], torch.int8)
    with pytest.raises(ValueError, match="expected \\[N, num_heads"):
        AttentionKernel(native, 1)(
            case.query({0: (0, 1)}), case.cache[..., :64].contiguous(), case.rows({0: (0, 1)}), torch.float32
        )
