"""The native kernels of this machine as an object: a shared library whose functions are called without the GIL."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvrelay.kernels.native_build import build_native
from kvrelay.kernels.native_levels import Level, best_level, read_cpu_flags


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The kernels compiled for `level`. Functions give nothing back and take addresses, int64 and float32."""

    level: Level
    library: ctypes.CDLL

    def function(self, name: str, signature: str) -> Callable[..., None]:
        """An entry point. `signature` has a letter for each argument: p an address, i an int64, f a float32.

        Raises AttributeError if the library has no such function.
        """
        types = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
        function = ctypes.CFUNCTYPE(None, *(types[letter] for letter in signature))
        return function((name, self.library))


def load_native(cache_dir: Path, level: Level | None = None) -> NativeLibrary | None:
    """Builds, if need be, and loads the kernels for `level`, or else the best one that this processor has.

    None, with a line in the log, where they cannot be built. Raises StartError if the cache folder cannot be used.
    """
    chosen = level or best_level(read_cpu_flags())
    path = build_native(cache_dir, chosen)
    return None if path is None else NativeLibrary(chosen, ctypes.CDLL(str(path)))
