"""Paged attention, interpreted: close to the float64 twin, and bit for bit the same whatever is beside a token."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kvrelay.kernels.paged_attention import decode_attention, prefill_attention
from tests.kernels.interpreted import load_kernels
from tests.kernels.paged import Shape, assert_close, decoded, int32, paged, prefilled

pytestmark = pytest.mark.usefixtures("interpreter")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = (
    Shape(BF16, 3, 2, 64, 16),
    Shape(BF16, 4, 1, 128, 8),
    Shape(FP16, 1, 2, 80, 24),
    Shape(FP16, 7, 1, 16, 64),
    Shape(FP32, 2, 1, 32, 33),
    Shape(BF16, 2, 2, 64, 16, quantised=True),
)


def loaded(*, warpgroups: bool) -> ModuleType:
    """The kernels with the tiles of most GPUs, or with those of Hopper."""
    module = load_kernels("paged_attention_triton", interpreted=True)
    vars(module)["has_warpgroups"] = lambda device: warpgroups
    vars(module)["_SPLIT"] = 64  # so that short contexts have several
    return module


@pytest.fixture(scope="module")
def kernels() -> dict[bool, ModuleType]:
    """By whether the GPU has warpgroups."""
    return {warpgroups: loaded(warpgroups=warpgroups) for warpgroups in (False, True)}


Kernels = dict[bool, ModuleType]
EVERY = [*((False, shape) for shape in SHAPES), (True, SHAPES[0])]
SOME = [(False, SHAPES[0]), (False, SHAPES[4]), (False, SHAPES[5]), (True, SHAPES[0])]


@pytest.mark.parametrize(("warpgroups", "shape"), EVERY, ids=str)
def test_decoding_is_close_to_the_twin(kernels: Kernels, shape: Shape, warpgroups: bool) -> None:
    on, rows = paged(shape, (155, 128)), [(0, 155), (1, 0), (0, 1), (1, 64), (1, 66)]
    found = decoded(on, rows, kernels[warpgroups])
    assert_close(found, decoded(on, rows))
    assert found[1].eq(0).all()


@pytest.mark.parametrize(("warpgroups", "shape"), EVERY, ids=str)
def test_prefill_is_close_to_the_twin(kernels: Kernels, shape: Shape, warpgroups: bool) -> None:
    on, chunks = paged(shape, (150, 37, 1)), [(0, 126, 150), (1, 0, 37), (1, 5, 5), (2, 0, 1)]
    assert_close(prefilled(on, chunks, kernels[warpgroups]), prefilled(on, chunks))


@pytest.mark.parametrize(("warpgroups", "shape"), SOME, ids=str)
def test_a_token_has_the_same_bits_however_it_is_computed(kernels: Kernels, shape: Shape, warpgroups: bool) -> None:
    """Decoded alone or among others, in a chunk of any size, in blocks of any size."""
    module = kernels[warpgroups]
    on, other = paged(shape, (130, 70)), paged(replace(shape, block_size=8), (130, 70))
    whole = prefilled(on, [(0, 110, 130), (1, 60, 67)], module)
    parts = [prefilled(on, [(0, begin, end)], module) for begin, end in ((110, 117), (117, 118), (118, 130))]
    assert torch.equal(whole[:20], torch.cat(parts))
    assert torch.equal(whole, prefilled(other, [(0, 110, 130), (1, 60, 67)], module))
    alone = decoded(on, [(0, 130)], module)
    assert torch.equal(whole[19:20], alone)
    assert torch.equal(torch.cat((alone, whole[20:21])), decoded(other, [(1, 3), (0, 130), (1, 61)], module)[1:])


@pytest.mark.soak
@pytest.mark.parametrize(("warpgroups", "shape"), SOME, ids=str)
def test_long_contexts_have_the_same_bits_too(shape: Shape, warpgroups: bool) -> None:
    """In the splits that users get."""
    module = load_kernels("paged_attention_triton", interpreted=True)
    vars(module)["has_warpgroups"] = lambda device: warpgroups
    on = paged(shape, (1100, 520))
    chunks, rows = [(0, 1015, 1100), (1, 505, 520)], [(0, 1100), (1, 512), (1, 513), (0, 1024), (0, 1025)]
    whole, found = prefilled(on, chunks, module), decoded(on, rows, module)
    assert_close(whole, prefilled(on, chunks))
    assert torch.equal(found, whole[[84, 85 + 6, 85 + 7, 8, 9]])


def test_what_does_not_fit_is_refused() -> None:
    on = paged(SHAPES[0], (20,))
    q, counts = on.queries[0][:1], int32([20], torch.device("cpu"))
    wrong = (
        (q.float(), on.kv, on.tables, counts, torch.empty_like(q)),
        (q, on.kv[..., :32], on.tables, counts, torch.empty_like(q)),
        (q, on.kv, on.tables.long(), counts, torch.empty_like(q)),
        (q, on.kv, on.tables, counts, torch.empty_like(q)[:, :1]),
        (q[:, :5], on.kv, on.tables, counts, torch.empty_like(q)[:, :5]),
    )
    for arguments in wrong:
        with pytest.raises(ValueError, match="do not fit together"):
            decode_attention(*arguments)
    with pytest.raises(ValueError, match="1 rows are counted, expected the 2"):
        decode_attention(on.queries[0][:2], on.kv, on.tables, counts, torch.empty_like(on.queries[0][:2]))
    with pytest.raises(ValueError, match="starts of 1 sequences"):
        prefill_attention(q, on.kv, on.tables, counts, counts, 1, torch.empty_like(q))
