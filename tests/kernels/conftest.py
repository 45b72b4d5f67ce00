"""The native kernels, compiled for every instruction set level that this processor has."""

from pathlib import Path

import pytest

from kvrelay.kernels.native_levels import levels_of, read_cpu_flags
from kvrelay.kernels.native_library import NativeLibrary, load_native


@pytest.fixture(scope="session", params=levels_of(read_cpu_flags()), ids=lambda level: level.name)
def native(request: pytest.FixtureRequest, cache_dir: Path) -> NativeLibrary:
    """A machine that runs these tests can compile: `make test` asks for that."""
    library = load_native(cache_dir, request.param)
    assert library is not None, "the log says why"
    return library
