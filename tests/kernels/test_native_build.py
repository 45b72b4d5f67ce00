"""Native kernels are compiled once, for what the processor has, and whatever goes wrong is told in a line."""

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.kernels.native_build import build_native
from kvrelay.kernels.native_levels import LEVELS, best_level, levels_of, read_cpu_flags
from kvrelay.kernels.native_library import load_native

PORTABLE = LEVELS[-1]
ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return %s; }'
BUILD = (
    "import sys; from pathlib import Path; from kvrelay.kernels.native_build import build_native; "
    "from kvrelay.kernels.native_levels import LEVELS; "
    "print(build_native(Path(sys.argv[1]), LEVELS[-1], Path(sys.argv[2])))"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with one function in it."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "answer.cpp").write_text('#include "number.h"\n' + ANSWER % "NUMBER")
    (folder / "number.h").write_text("#define NUMBER 42\n")
    return folder


def counting_compiler(tmp_path: Path) -> Path:
    """A compiler that writes down each source that it compiles."""
    path = tmp_path / "counting-c++"
    path.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*) echo >> {tmp_path}/compiled;; esac\nexec c++ "$@"\n')
    path.chmod(0o755)
    return path


def answer(library: Path | None) -> int:
    """What the one function says."""
    assert library is not None
    return int(ctypes.CDLL(str(library)).answer())


def test_processes_that_start_at_once_compile_once(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one compiles, the others wait for it and take the same file."""
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)))
    command = [sys.executable, "-c", BUILD, str(tmp_path / "cache"), str(sources)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0].strip() for process in processes}
    assert len(paths) == 1
    assert answer(Path(paths.pop())) == 42
    assert (tmp_path / "compiled").read_text() == "\n"


@pytest.mark.parametrize("changed", ["answer.cpp", "number.h"])
def test_a_changed_source_is_compiled_again(tmp_path: Path, sources: Path, changed: str) -> None:
    """Also one that is only included. What was made of the old one stays as it is."""
    before = build_native(tmp_path / "cache", PORTABLE, sources)
    text = (sources / changed).read_text()
    (sources / changed).write_text(text.replace("NUMBER 42", "NUMBER 7").replace("return NUMBER", "return 7"))
    after = build_native(tmp_path / "cache", PORTABLE, sources)
    assert (answer(before), answer(after)) == (42, 7)
    assert build_native(tmp_path / "cache", PORTABLE, sources) == after


def test_what_a_killed_builder_left_is_cleared_away(tmp_path: Path, sources: Path) -> None:
    """Nothing but libraries and locks stays in the cache."""
    path = build_native(tmp_path / "cache", PORTABLE, sources)
    assert path is not None
    path.unlink()
    left = path.parent / f"{path.stem}.killed.tmp"
    left.mkdir()
    assert build_native(tmp_path / "cache", PORTABLE, sources) == path
    assert sorted(path.parent.iterdir()) == [path.with_suffix(".lock"), path]


def test_a_compiler_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line tells what to install."""
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert load_native(tmp_path / "cache", PORTABLE) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "torch alone" in record.getMessage()
    assert "apt install g++" in record.getMessage()


def test_an_error_of_the_compiler_is_named(tmp_path: Path, sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first one, with its place; and the next attempt compiles again."""
    (sources / "answer.cpp").write_text("int one() { return 1; }\nint two() { return undeclared; }\nint three( {}\n")
    assert build_native(tmp_path / "cache", PORTABLE, sources) is None
    (record,) = caplog.records
    assert "torch alone" in record.getMessage()
    assert "answer.cpp:2:" in record.getMessage()
    assert "undeclared" in record.getMessage()
    (sources / "answer.cpp").write_text(ANSWER % "1")
    assert answer(build_native(tmp_path / "cache", PORTABLE, sources)) == 1


@pytest.mark.parametrize(
    ("cpu_flags", "best"),
    [
        ("", "portable"),
        ("fpu sse2 avx", "portable"),
        ("avx2", "portable"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f avx512dq", "avx2"),
        ("avx2 fma f16c avx512f avx512dq avx512bw avx512vl", "avx512"),
        ("avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_vnni", "avx512vnni"),
        ("avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_vnni avx512_bf16", "avx512bf16"),
        ("avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_bf16", "avx512"),
        ("avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8", "avx512bf16"),
        ("avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16", "amx"),
    ],
)
def test_the_level_is_the_best_that_the_processor_has(tmp_path: Path, cpu_flags: str, best: str) -> None:
    """As Linux writes down the flags of each processor."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {cpu_flags}\n\nprocessor\t: 1\nflags\t\t: {cpu_flags}\n")
    levels = levels_of(read_cpu_flags(cpuinfo))
    assert best_level(read_cpu_flags(cpuinfo)) == next(level for level in levels if level.name != "amx")
    assert levels[0].name == best
    assert levels[-1] == PORTABLE


def test_an_unknown_processor_is_portable(tmp_path: Path) -> None:
    """Where there is no such file, or it has no flags."""
    (tmp_path / "cpuinfo").write_text("CPU architecture: 8\n")
    for name in ("cpuinfo", "none"):
        assert levels_of(read_cpu_flags(tmp_path / name)) == (PORTABLE,)
