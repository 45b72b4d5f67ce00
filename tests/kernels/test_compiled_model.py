"""All that a whole model launches, compiled for a GPU that is not here: its steps work there the first time."""

import importlib
from pathlib import Path

import pytest
import torch

from kvrelay.checkpoint import resolve
from kvrelay.kernels.gumbel import sample_tokens
from kvrelay.model.load import load
from kvrelay.model.packed_weights import Quantization
from tests.kernels.compiled import TARGETS, Launches, compile_launch, different, spied
from tests.kernels.interpreted import MODULES, load_kernels
from tests.kernels.sampled import row_sampling, sequences
from tests.model.conftest import Driver, random_ids
from tests.model.test_gguf import VOCAB, write_gguf

TARGET = "sm_90"
KERNELS = {
    "limits_kernel", "pick_kernel", "choose_kernel", "matmul_kernel", "quantised_matmul_kernel", "add_rms_norm_kernel",
    "silu_and_mul_kernel", "decode_kernel", "merge_kernel", "prefill_kernel", "rope_kernel",
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launches]:
    """Kernels that compute nothing, and remember how they were launched."""
    spies = []
    for name in MODULES:
        module = importlib.import_module(f"kvrelay.kernels.{name}")
        kernels = load_kernels(f"{name}_triton", interpreted=False)
        spies += spied(kernels, TARGET, monkeypatch)
        monkeypatch.setattr(module, f"{name}_triton", kernels, raising=False)
        monkeypatch.setattr(module, "takes_triton", lambda tensor: True)
    monkeypatch.setattr("kvrelay.model.load.HAS_TRITON", True)
    monkeypatch.setattr("kvrelay.model.load.IS_INTERPRETED", True)
    return spies


@pytest.mark.parametrize(
    ("arch", "dtype", "quantization"),
    [
        ("llama", "bfloat16", Quantization.NONE),
        ("qwen2", "bfloat16", Quantization.INT8),
        pytest.param("qwen3", "float16", Quantization.NONE, marks=pytest.mark.soak),
        pytest.param("qwen3", "float32", Quantization.NONE, marks=pytest.mark.soak),
    ],
)
def test_all_launches_of_a_model_fit_the_chip(
    arch: str, dtype: str, quantization: Quantization, launches: list[Launches], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", arch)
    driver = Driver(
        load(
            resolve(str(tmp_path / "m.gguf"), tmp_path),
            cache_dir=tmp_path,
            device="cpu",
            dtype=dtype,
            quantization=quantization,
            kernels="triton",
            kv_memory_bytes=4 << 20,
        )
    )
    driver.runner.kv_cache.tensor.zero_()
    rows = [driver.sequence(random_ids(length, VOCAB, length)) for length in (20, 1, 9)]
    with pytest.MonkeyPatch.context() as patch:  # what is not computed must not be sampled from
        patch.setattr(driver.sampler, "sample", lambda logits, sequences: [0] * len(sequences))
        driver.step((rows[0], 13), (rows[1], 1), (rows[2], 9))
        driver.step((rows[0], 7), (rows[1], 1), (rows[2], 1))
        driver.step((rows[0], 1))
    sample_tokens(torch.zeros(3, VOCAB), row_sampling(sequences(3, VOCAB, seed=1)), torch.zeros(3, dtype=torch.int64))
    reports = [compile_launch(*launch, TARGET, tmp_path / "compiled") for launch in different(launches)]
    unused = "matmul_kernel" if quantization is Quantization.INT8 else "quantised_matmul_kernel"
    assert {report.kernel for report in reports} == KERNELS - {unused}
    assert [report.kernel for report in reports if report.shared_bytes > TARGETS[TARGET][3]] == []
