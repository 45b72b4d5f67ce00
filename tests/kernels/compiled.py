"""Compiles kernels for GPUs that are not here, with the very arguments and options of their launches."""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kvrelay.kernels.launch
from tests.kernels.interpreted import load_kernels, triton

# Shared memory of a program, in bytes: of an A100, of an H100 and of an MI300.
TARGETS = {"sm_80": ("cuda", 80, 32, 166912), "sm_90": ("cuda", 90, 32, 232448), "gfx942": ("hip", "gfx942", 64, 65536)}


@dataclass
class Launches:
    """Stands in for a kernel and keeps what it was launched with, one launch for each different set of types."""

    kernel: Any
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.seen.append((args, options))

        return launch


@dataclass(frozen=True)
class Report:
    """What became of one launch: the code's text and what it takes of the chip."""

    kernel: str
    text: str
    layouts: tuple[str, ...]
    spilled_bytes: int
    shared_bytes: int


def recorded(module: str, target: str, launch: Callable[[ModuleType], None]) -> Iterator[tuple[Any, Any, Any]]:
    """The kernels, arguments and options that `launch` uses on such a GPU."""
    loaded = load_kernels(module, interpreted=False)
    with pytest.MonkeyPatch.context() as patch:
        spies = spied(loaded, target, patch)
        launch(loaded)
    for spy in spies:
        for args, options in spy.seen:
            yield spy.kernel, args, options


def spied(loaded: ModuleType, target: str, patch: pytest.MonkeyPatch) -> list[Launches]:
    """Stands in for the kernels of a module, which is told that it is on such a GPU."""
    names = [name for name, value in vars(loaded).items() if name.endswith("_kernel") and hasattr(value, "arg_names")]
    spies = {name: Launches(getattr(loaded, name)) for name in names}
    patch.setattr(torch.version, "hip", "6.4" if TARGETS[target][0] == "hip" else None)
    if target == "sm_90":
        patch.setattr(kvrelay.kernels.launch, "has_warpgroups", lambda device: True)
        if hasattr(loaded, "has_warpgroups"):
            patch.setattr(loaded, "has_warpgroups", lambda device: True)
    for name, spy in spies.items():
        patch.setattr(loaded, name, spy)
    return list(spies.values())


def compiled(module: str, target: str, launch: Callable[[ModuleType], None], cache: Path) -> list[Report]:
    """Compiles what `launch` launches, down to machine code."""
    return [compile_launch(*recording, target, cache) for recording in recorded(module, target, launch)]


def different(spies: list[Launches]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Kernels, arguments and options of what was launched, one for each that Triton compiles anew."""
    found = {}
    for spy in spies:
        for args, options in spy.seen:
            special = [not parameter.do_not_specialize for parameter in spy.kernel.params]
            seen = tuple((_type(each), own and _special(each)) for each, own in zip(args, special, strict=False))
            found[spy.kernel.__name__, seen, tuple(options.items())] = (spy.kernel, args, options)
    return list(found.values())


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], target: str, cache: Path) -> Report:
    """Compiles one launch, down to machine code."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip(kernel.arg_names, args, strict=False))
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    special = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
    constants |= {name: 1 for name in special & given.keys() if type(given[name]) is int and given[name] == 1}
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else _type(given[name]) for name in kernel.arg_names},
        constexprs=constants,
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, (name, value) in enumerate(given.items())
            if name in special and _aligned(value)
        },
    )
    backend, arch, warp_size, _ = TARGETS[target]
    log = io.StringIO()
    with triton.knobs.cache.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.cache.dir = str(cache)
        triton.knobs.nvidia.dump_ptxas_log = True
        done = triton.compile(
            source,
            target=GPUTarget(backend, arch, warp_size),
            options={name: value for name, value in options.items() if name not in constants},
        )
    text = done.asm["ptx" if backend == "cuda" else "amdgcn"]
    report = log.getvalue() if backend == "cuda" else text
    counts = re.findall(r"(\d+) bytes spill|[sv]gpr_spill_count:\s+(\d+)", report)
    if not counts:
        raise ValueError(f"The compiler did not say what {kernel.__name__} spilled:\n{report[-2000:]}")
    return Report(
        kernel.__name__,
        text,
        _matrix_layouts(done.asm["ttgir"]),
        sum(int(a or b) for a, b in counts),
        done.metadata.shared,
    )


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + {"bool": "i1"}.get(str(value.dtype)[6:], _short(value.dtype))
    return "fp32" if isinstance(value, float) else "i32"


def _short(dtype: torch.dtype) -> str:
    kind = "bf" if dtype == torch.bfloat16 else "fp" if dtype.is_floating_point else "i" if dtype.is_signed else "u"
    return f"{kind}{dtype.itemsize * 8}"


def _special(value: Any) -> tuple[bool, bool]:
    return _aligned(value), type(value) is int and value == 1


def _aligned(value: Any) -> bool:
    return value.data_ptr() % 16 == 0 if isinstance(value, torch.Tensor) else type(value) is int and value % 16 == 0


def _matrix_layouts(ttgir: str) -> tuple[str, ...]:
    """Of each matrix product: its instruction and how warps lie over its rows and columns."""
    named = dict(re.findall(r"^(#\w+) = (#ttg\.(?:nvidia_mma|amd_mfma)<\{.*\}>)", ttgir, re.MULTILINE))
    return tuple(sorted(named.values()))
