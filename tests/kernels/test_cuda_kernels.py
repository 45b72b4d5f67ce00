"""The kernels of a decoder layer on a real GPU: against float64 twins on the CPU, and bit for bit among themselves."""

from dataclasses import replace

import pytest
import torch

from kvrelay.kernels.gumbel import sample_tokens
from kvrelay.kernels.matmul import dequantised, matmul, quantised_matmul
from kvrelay.kernels.norm_and_gate import add_rms_norm, silu_and_mul
from kvrelay.model.sampler import Sampler
from tests.kernels import rotated
from tests.kernels.paged import Shape, assert_close, decoded, paged, prefilled
from tests.kernels.sampled import row_sampling, sequences, tied_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDED = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2e-5}
SHAPES = (
    Shape(BF16, 4, 8, 128, 16),
    Shape(BF16, 4, 8, 64, 64),
    Shape(BF16, 3, 3, 64, 8),
    Shape(FP16, 7, 2, 128, 24),
    Shape(FP16, 1, 2, 80, 16),
    Shape(BF16, 4, 2, 256, 16),
    Shape(FP32, 4, 2, 64, 33),
    Shape(BF16, 4, 8, 128, 16, quantised=True),
)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    """float32, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """To be written to, on the GPU."""
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_close_to_the_twin(shape: Shape) -> None:
    on = paged(shape, (1300, 512, 70))
    rows, chunks = [(0, 1300), (1, 0), (1, 512), (2, 65), (0, 1)], [(0, 1111, 1300), (1, 300, 300), (2, 0, 70)]
    assert_close(decoded(on.to("cuda"), rows), decoded(on, rows))
    assert_close(prefilled(on.to("cuda"), chunks), prefilled(on, chunks))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_has_the_same_attention_however_it_is_computed(shape: Shape) -> None:
    """Decoded alone or among others, in a chunk of any size, in blocks of any size: the same bits."""
    on = paged(shape, (1300, 700)).to("cuda")
    whole = prefilled(on, [(0, 0, 1300), (1, 0, 700)])
    for size in (1, 17, 64, 256):
        begin = 1300 - 3 * size
        parts = [prefilled(on, [(1, 690, 700), (0, first, first + size)])[10:] for first in range(begin, 1300, size)]
        assert torch.equal(torch.cat(parts), whole[begin:1300]), f"in chunks of {size}"
    lengths = (1, 64, 65, 511, 512, 513, 1024, 1299, 1300)
    together = decoded(on, [*((0, length) for length in lengths), *((1, length) for length in range(600, 700))])
    assert torch.equal(together[: len(lengths)], whole[[length - 1 for length in lengths]])
    assert torch.equal(decoded(on, [(0, 1300)]), whole[1299:1300])
    other = paged(replace(shape, block_size=8), (1300, 700)).to("cuda")
    assert torch.equal(prefilled(other, [(0, 0, 1300), (1, 0, 700)]), whole)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 576), (40, 4096), (2, 14337)])
def test_norms_and_gates(num_rows: int, size: int, dtype: torch.dtype) -> None:
    hidden, delta, weight = normal(num_rows, size), normal(num_rows, size, seed=2).to(dtype), normal(size, seed=3)
    on_gpu, out, expected = hidden.cuda(), poisoned(num_rows, size, dtype=dtype), torch.empty(num_rows, size).to(dtype)
    add_rms_norm(on_gpu, delta.cuda(), weight.cuda(), 1e-5, out)
    add_rms_norm(hidden, delta, weight, 1e-5, expected)
    assert torch.equal(on_gpu.cpu(), hidden)
    torch.testing.assert_close(out.cpu(), expected, rtol=ROUNDED[dtype], atol=1e-5)
    add_rms_norm(hidden[-1:].cuda(), None, weight.cuda(), 1e-5, alone := poisoned(1, size, dtype=dtype))
    assert torch.equal(alone, out[-1:])

    gate_up = (normal(num_rows, 2 * size, seed=4) * 4).to(dtype)
    silu_and_mul(gate_up.cuda(), out)
    silu_and_mul(gate_up, expected)
    torch.testing.assert_close(out.cpu(), expected, rtol=ROUNDED[dtype], atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        rotated.Shape(BF16, 32, 8, 128, 16),
        rotated.Shape(BF16, 9, 3, 64, 8, normed=True),
        rotated.Shape(FP16, 2, 2, 80, 24),
        rotated.Shape(FP32, 4, 1, 128, 64, normed=True),
        rotated.Shape(BF16, 32, 8, 128, 16, normed=True, quantised=True),
    ],
    ids=str,
)
def test_rotation(shape: rotated.Shape) -> None:
    slots = [0, 37, -1, 5, 21, 90, 91]
    found, twin = rotated.rotated(shape, slots, on="cuda"), rotated.rotated(shape, slots)
    torch.testing.assert_close(found.q, twin.q, rtol=ROUNDED[shape.dtype], atol=2e-3 if shape.dtype == BF16 else 1e-4)
    atol = 8.0 / 127 if shape.quantised else 2e-3 if shape.dtype == BF16 else 1e-4
    values = found.values(), twin.values()
    torch.testing.assert_close(*values, rtol=ROUNDED[shape.dtype], atol=atol, equal_nan=True)
    alone = rotated.rotated(shape, slots, slice(3, 4), on="cuda")
    assert torch.equal(found.q[3:4], alone.q)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 33, 65), (70, 576, 1536), (257, 9000, 512)])
def test_products(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, outputs, inputs = size
    x, weight = normal(rows, inputs).to(dtype), (normal(outputs, inputs, seed=2) / inputs**0.5).to(dtype)
    bias, out = normal(outputs, seed=3).to(dtype), poisoned(rows, outputs, dtype=FP32)
    matmul(x.cuda(), weight.cuda(), bias.cuda(), out)
    matmul(x, weight, bias, expected := torch.empty(rows, outputs))
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (4096, 4096), (9000, 512), (16384, 2048)])
def test_a_row_has_the_same_product_beside_any_others(outputs: int, inputs: int) -> None:
    """The same bits, for 1 to 1,000 rows."""
    x, weight = normal(1000, inputs).to(BF16).cuda(), normal(outputs, inputs, seed=2).to(BF16).cuda()
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
    scales = torch.rand(outputs, inputs // 32, dtype=FP32, device="cuda").half()
    matmul(x, weight, None, whole := poisoned(1000, outputs, dtype=FP32))
    quantised_matmul(x, codes, scales, scales, None, coded := poisoned(1000, outputs, dtype=FP32))
    for first, count in ((0, 1), (77, 1), (999, 1), (5, 3), (100, 64), (30, 65), (1, 500)):
        rows = slice(first, first + count)
        matmul(x[rows], weight, None, some := poisoned(count, outputs, dtype=FP32))
        assert torch.equal(some, whole[rows])
        quantised_matmul(x[rows], codes, scales, scales, None, some)
        assert torch.equal(some, coded[rows])


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("size", [(1, 33, 96), (70, 576, 1536), (257, 9000, 512)])
def test_products_with_codes(size: tuple[int, int, int], grouped: bool) -> None:
    rows, outputs, inputs = size
    x, made = normal(rows, inputs).to(BF16), torch.Generator().manual_seed(4)
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=made)
    scales = torch.rand((outputs, inputs // 32) if grouped else (outputs,), generator=made) / 5000
    minimums = -scales * 3 if grouped else None
    out, on_gpu = poisoned(rows, outputs, dtype=FP32), None if minimums is None else minimums.cuda()
    quantised_matmul(x.cuda(), codes.cuda(), scales.cuda(), on_gpu, None, out)
    quantised_matmul(x, codes, scales, minimums, None, expected := torch.empty(rows, outputs))
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-5, atol=2e-5)
    if minimums is not None:
        weight = dequantised(codes, scales, minimums, BF16).cuda()
        matmul(x.cuda(), weight, None, plain := poisoned(rows, outputs, dtype=FP32))
        assert torch.equal(out, plain)


@pytest.mark.parametrize("vocab", [1, 97, 5000, 128256])
def test_tokens_are_those_of_the_sampler(vocab: int) -> None:
    logits, known = tied_logits(64, vocab, seed=vocab).nan_to_num(neginf=-30.0), sequences(64, vocab, seed=3)
    out = torch.full((64,), -7, device="cuda")
    sample_tokens(logits.cuda(), row_sampling(known, "cuda"), out)
    assert out.tolist() == Sampler().sample(logits, known)


def test_rows_without_a_finite_best_logit_are_told() -> None:
    logits = torch.zeros(4, 3000)
    logits[1, 2900], logits[2, 5], logits[3] = torch.nan, torch.inf, -torch.inf
    out = torch.full((4,), -7, device="cuda")
    sample_tokens(logits.cuda(), row_sampling(sequences(4, 3000, seed=3), "cuda"), out)
    assert out[0] >= 0
    assert out[1:].eq(-1).all()
