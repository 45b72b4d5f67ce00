"""What tests of kernels share: the native ones of every instruction set level, and Triton's interpreter."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.kernels.native_levels import LEVELS, Level, levels_of, read_cpu_flags
from kvrelay.kernels.native_library import NativeLibrary, load_native


@pytest.fixture(
    scope="session",
    params=[pytest.param(level, marks=[] if level.tried else [pytest.mark.soak], id=level.name) for level in LEVELS],
)
def native(request: pytest.FixtureRequest, cache_dir: Path) -> NativeLibrary:
    """A machine that runs these tests can compile: `make test` asks for that. Levels that it cannot run are skipped."""
    level: Level = request.param
    if level not in levels_of(read_cpu_flags()):
        pytest.skip(f"This processor cannot run {level.name}.")
    library = load_native(cache_dir, level)
    assert library is not None, "the log says why"
    return library


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Triton's interpreter, with the mistakes put right that would show."""
    from tests.kernels.interpreted import mend_interpreter  # not where Triton is missing

    with pytest.MonkeyPatch.context() as patch:
        mend_interpreter(patch)
        yield
