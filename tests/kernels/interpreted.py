"""Loads kernels of Triton without a GPU: interpreted on tensors of the CPU, or to compile them ahead of time."""

import functools
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.model import load

triton = pytest.importorskip("triton", reason="the kernels need Triton, which is there for Linux")
own = pytest.importorskip("triton.runtime.interpreter")

KERNELS = Path(__file__).parents[2] / "kernels"


def load_kernels(name: str, *, interpreted: bool) -> ModuleType:
    """A copy of a module; `triton.jit` asks when it decorates whether to interpret on the CPU or to compile."""
    spec = importlib.util.spec_from_file_location(f"{name}_{interpreted=}", KERNELS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        spec.loader.exec_module(module)
    return module


MODULES = ("gumbel", "matmul", "norm_and_gate", "paged_attention", "rope")  # what a model computes with
_TILE = {"rows": 32, "outputs": 128, "depth": 64, "near": 8}
_SIZES: dict[str, dict[str, Any]] = {"matmul": {"_shape": lambda *_: _TILE}, "paged_attention": {"_SPLIT": 32}}


def interpret_everywhere(patch: pytest.MonkeyPatch) -> None:
    """A model computes with Triton's kernels, interpreted, on the CPU.

    Products have larger tiles than on a GPU, since each program takes the interpreter milliseconds, and attention
    smaller splits, so that short contexts have several.
    """
    mend_interpreter(patch)
    for name in MODULES:
        module = importlib.import_module(f"kvrelay.kernels.{name}")
        kernels = load_kernels(f"{name}_triton", interpreted=True)
        patch.setattr(module, f"{name}_triton", kernels, raising=False)
        patch.setattr(module, "takes_triton", lambda tensor: True)
        for changed in _SIZES.get(name, {}).items():
            patch.setattr(kernels, *changed)
    patch.setattr(load, "HAS_TRITON", True)
    patch.setattr(load, "IS_INTERPRETED", True)


def mend_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Puts right what Triton's interpreter gets wrong when the process also compiles, and with bfloat16.

    Products are summed one after the other, so that a row's bits depend on nothing else, as in a matrix instruction;
    the BLAS behind numpy promises no such thing.
    """
    _mend_calls(patch)
    _mend_bfloat16(patch)


def _mend_calls(patch: pytest.MonkeyPatch) -> None:
    """Triton's library was loaded to be compiled: it is interpreted too, and is itself again after each kernel."""
    replace_language = own._patch_lang
    everything = SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})

    @functools.cache
    def interpreted(function: Any) -> Any:
        return own.InterpretedFunction(function)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return interpreted(self.fn).rewrite()(*args, **options)

    patch.setattr(own, "_patch_lang", lambda function: replace_language(everything))
    patch.setattr(own.InterpretedFunction, "__call__", call)
    patch.setattr(triton.runtime.jit.JITFunction, "__call__", call)


def _mend_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Triton takes its bits for an integer in products and in conversions from integers, and cuts them off."""
    bf16, fp32 = triton.language.bfloat16, triton.language.float32
    convert_others, cast_others = own._convert_float, own.InterpreterBuilder.cast_impl

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (fp32, bf16):
            return convert_others(data, source, target, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16)
        return rounded.numpy().reshape(data.shape)

    def cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == bf16 and source.dtype.scalar != fp32:
            source = cast_others(self, source, fp32)
        return cast_others(self, source, target)

    def float32(handle: Any) -> Any:
        if handle.dtype.scalar == bf16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right, total = float32(a), float32(b), d.data.astype(np.float32)
        for k in range(left.shape[1]):
            total = total + left[:, k, None] * right[None, k, :]
        return own.TensorHandle(total, d.dtype.scalar)

    patch.setattr(own, "_convert_float", convert)
    patch.setattr(own.InterpreterBuilder, "cast_impl", cast)
    patch.setattr(own.InterpreterBuilder, "create_dot", dot)
