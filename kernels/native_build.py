"""Builds the native kernels for one instruction set level, once per machine, into the cache folder.

A library is named by all that makes it what it is: sources, flags and compiler. Several processes may ask at once.
"""

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ninja
from torch.utils import cpp_extension

from kvrelay.cache import locked
from kvrelay.errors import StartError
from kvrelay.kernels.native_levels import Level

SOURCES = Path(__file__).resolve().parent / "native"

# Contraction would fuse a product and a sum in one loop and not in another, and sameness would depend on the compiler.
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
_NAME = "kernels"
_FIRST_ERROR = re.compile(r"^.*\b(?:fatal )?error: .*$", re.MULTILINE)


class _CompilerError(Exception):
    """What the compiler said first."""


log = logging.getLogger(__name__)


def build_native(cache_dir: Path, level: Level, sources: Path = SOURCES) -> Path | None:
    """The library of the `*.cpp` in `sources` for `level`, compiled if it is not in the cache yet.

    None where it cannot be compiled; then one line in the log says why, and what to do. Raises StartError if the
    cache folder cannot be used.
    """
    if (compiler := _compiler()) is None:
        log.warning(
            "There is no C++ compiler (%s), so everything is computed by torch alone, which is slower; install one, on "
            "Debian and Ubuntu with: apt install g++",
            _command(),
        )
        return None
    path = cache_dir / "native" / f"{level.name}-{_digest(sources, level, compiler)}.so"
    with locked(path.with_suffix(".lock")):
        if path.is_file():
            return path
        log.info("Building the CPU kernels for %s (once per machine) ...", level.name)
        try:
            _compile(path, level, sources)
        except _CompilerError as error:
            log.warning(
                "The CPU kernels cannot be built, so everything is computed by torch alone, which is slower. %s: %s",
                compiler.partition("\n")[0],
                error,
            )
            return None
        except OSError as error:
            raise StartError(
                f"{path} cannot be written: {error.strerror}; make room there or name another folder with --cache-dir."
            ) from error
    return path


def _command() -> str:
    return str(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call]


def _compiler() -> str | None:
    """What the compiler that torch would use says about itself; None if it does not run."""
    command = shlex.split(_command())
    if shutil.which(command[0]) is None:
        return None
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", check=False)
    return answer.stdout if answer.returncode == 0 else None


def _digest(sources: Path, level: Level, compiler: str) -> str:
    digest = hashlib.sha256("\0".join((compiler, *_FLAGS, *level.compiler_flags)).encode())
    for file in sorted(file for file in sources.iterdir() if file.suffix in (".cpp", ".h")):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def _compile(path: Path, level: Level, sources: Path) -> None:
    """Compiles in a folder of its own and renames the result, so that a killed builder leaves no half library."""
    for stale in path.parent.glob(f"{path.stem}.*.tmp"):  # of a builder that was killed; the lock is ours now
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp") as folder:
        files = [str(file) for file in sorted(sources.glob("*.cpp"))]
        arguments = [folder, _NAME, *files, "--", *_FLAGS, *level.compiler_flags]
        result = subprocess.run(
            [sys.executable, "-P", str(Path(__file__).with_name("native_compile.py")), *arguments],
            env={**os.environ, "PATH": os.pathsep.join((ninja.BIN_DIR, os.environ.get("PATH", os.defpath)))},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if result.returncode != 0:
            raise _CompilerError(_first_error(result.stdout + result.stderr))
        (Path(folder) / f"{_NAME}.so").replace(path)


def _first_error(output: str) -> str:
    found = _FIRST_ERROR.search(output)
    lines = output.strip().splitlines() or ["nothing was printed"]
    return found[0] if found else lines[-1]
