"""Instruction set levels that the native kernels are compiled for, and which of them a processor has."""

from dataclasses import dataclass
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_AMX = (*_BF16, "amx_tile", "amx_int8", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Level:
    """What the compiler may use. `cpu_flags` are the names of Linux for what the processor must have.

    One that is not `tried`, since no such processor has run it yet, is taken only where it is named.
    """

    name: str
    cpu_flags: tuple[str, ...] = ()
    tried: bool = True

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """For gcc and clang, which spell the same flags `-mavx512vnni` and `-mamx-int8`."""
        return tuple(f"-m{flag.replace('amx_', 'amx-').replace('_', '')}" for flag in self.cpu_flags)


LEVELS = (
    Level("amx", _AMX, tried=False),
    Level("avx512bf16", _BF16),
    Level("avx512vnni", _VNNI),
    Level("avx512", _AVX512),
    Level("avx2", _AVX2),
    Level("portable"),
)


def levels_of(cpu_flags: frozenset[str]) -> tuple[Level, ...]:
    """The levels that a processor with these flags can run, the best first. The last one is always `portable`."""
    return tuple(level for level in LEVELS if cpu_flags.issuperset(level.cpu_flags))


def best_level(cpu_flags: frozenset[str]) -> Level:
    """The best of the levels that were tried."""
    return next(level for level in levels_of(cpu_flags) if level.tried)


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What Linux says about the first processor; nothing where there is no such file (no Linux) or line (no x86)."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    names = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(names, "").split())
