"""Linear layers through AMX, whose instructions are emulated, so that they are tested on processors without it."""

import ctypes
from pathlib import Path

import pytest
import torch

from kvrelay.kernels.linear import LinearKernels, linear_plain
from kvrelay.kernels.linear_packing import Form
from kvrelay.kernels.native_build import SOURCES, build_native
from kvrelay.kernels.native_levels import levels_of, read_cpu_flags
from kvrelay.kernels.native_library import NativeLibrary, load_native
from tests.kernels.matrices import packed, random, rounding_errors

EMULATION = Path(__file__).with_name("amx_emulation.h")
LEVEL = next(level for level in levels_of(read_cpu_flags()) if level.name != "amx")
ROWS = [1, 15, 16, 17, 33, 50, 129, 150]
SHAPES = [(16, 32), (40, 33), (17, 31), (96, 160), (33, 1)]


@pytest.fixture(scope="module")
def emulated(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    """The kernels as for a processor with AMX."""
    folder = tmp_path_factory.mktemp("native")
    for source in SOURCES.iterdir():
        (folder / source.name).write_text(source.read_text())
    (folder / EMULATION.name).write_text(EMULATION.read_text())
    lanes = folder / "lanes.h"  # which brings in the real names, and comes before amx.h uses them
    lanes.write_text(f'{lanes.read_text()}\n#include "{EMULATION.name}"\n')
    path = build_native(cache_dir, LEVEL, folder)
    assert path is not None, "the log says why"
    return NativeLibrary(LEVEL, ctypes.CDLL(str(path)))


@pytest.fixture(scope="module")
def plain(cache_dir: Path) -> NativeLibrary:
    """The same kernels without AMX."""
    library = load_native(cache_dir, LEVEL)
    assert library is not None, "the log says why"
    return library


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", [Form.INT4, Form.INT8])
def test_integers_give_the_bits_of_other_levels(
    emulated: NativeLibrary, plain: NativeLibrary, form: Form, rows: int
) -> None:
    """Whether a block of rows goes through AMX or not."""
    for outputs, columns in SHAPES:
        weights, x = packed(form, outputs, columns), random(rows, columns)
        expected = LinearKernels(plain, num_threads=1)(x, weights)
        assert torch.equal(LinearKernels(emulated, num_threads=2)(x, weights), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_bfloat16_is_near_the_twin_and_the_same_in_any_batch(emulated: NativeLibrary, rows: int) -> None:
    """Rows alone, and rows of a block that is not full, too."""
    kernels = LinearKernels(emulated, num_threads=1)
    for outputs, columns in SHAPES:
        weights, x = packed(Form.BF16, outputs, columns), random(rows, columns)
        whole = kernels(x, weights)
        assert torch.all((whole - linear_plain(x, weights)).abs() <= rounding_errors(x, weights))
        assert torch.equal(torch.cat([kernels(row.unsqueeze(0), weights) for row in x]), whole)
        assert torch.equal(LinearKernels(emulated, num_threads=2)(x, weights), whole)
