"""Every kernel, compiled for GPUs that are not here, as it is launched there."""

import ast
import re
from pathlib import Path

import pytest

from tests.kernels.compiled import TARGETS, Report, compiled
from tests.kernels.interpreted import KERNELS
from tests.kernels.launches import RARE, USUAL, Launch

SIXTEEN_BYTES = {
    "decode_kernel": r"cp\.async\.cg\S+ \[[^]]*\], \[[^]]*\], 0x10",
    "prefill_kernel": r"cp\.async\.cg\S+ \[[^]]*\], \[[^]]*\], 0x10",
    "matmul_kernel": r"cp\.async\.cg\S+ \[[^]]*\], \[[^]]*\], 0x10",
    "gather_kernel": r"ld\.global\.v(4\.b32|2\.b64)",
    "scatter_kernel": r"st\.global\.v(4\.b32|2\.b64)",
    "digest_kernel": r"ld\.global\.v4\.b32(?!.*atom\..*atom\.)",  # one program adds to the sum once
    "add_rms_norm_kernel": r"ld\.global\.v4\.b32",
    "silu_and_mul_kernel": r"ld\.global\.v4\.b32",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("launch", [*USUAL, *(pytest.param(each, marks=pytest.mark.soak) for each in RARE)], ids=str)
def test_kernels_fit_the_chip(launch: Launch, target: str, tmp_path: Path) -> None:
    """No register is spilled, shared memory suffices, and what is wide is read 16 bytes at a time."""
    reports = compiled(launch.module, target, launch.call, tmp_path)
    assert [report.kernel for report in reports if report.spilled_bytes] == []
    assert [report.kernel for report in reports if report.shared_bytes > TARGETS[target][3]] == []
    if launch in USUAL and target.startswith("sm"):
        narrow = [
            report.kernel
            for report in reports
            if not re.search(SIXTEEN_BYTES.get(report.kernel, ""), report.text, re.DOTALL)
        ]
        assert narrow == []
    if launch.module == "paged_attention_triton":
        assert lanes(reports, "decode_kernel") == lanes(reports, "prefill_kernel")
    if target == "sm_90" and launch.module == "matmul_triton" and "float32" not in launch.name:
        assert "wgmma" in reports[0].text


def lanes(reports: list[Report], kernel: str) -> set[str]:
    """The matrix instructions of a kernel and how many warps share a row; how many rows there are does not matter."""
    layouts = next(report.layouts for report in reports if report.kernel == kernel)
    return {re.sub(r"warpsPerCTA = \[\d+, ", "warpsPerCTA = [", layout) for layout in layouts}


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*_triton.py")), ids=lambda path: path.stem)
def test_every_launch_says_whether_products_and_sums_are_fused(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    launches = [call for call in calls if isinstance(call.func, ast.Subscript)]  # kernel[grid](...)
    assert launches
    for call in launches:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        fusion = given.get("enable_fp_fusion")
        assert isinstance(fusion, ast.Constant), f"{path.name}:{call.lineno} does not set enable_fp_fusion"
        assert fusion.value is False, f"{path.name}:{call.lineno} fuses"


def test_all_kernels_are_compiled() -> None:
    """Those that the list of launches forgot would be compiled by users alone."""
    assert {launch.module for launch in USUAL} == {path.stem for path in KERNELS.glob("*_triton.py")}
