"""The measurements of GPU kernels, as far as they need no GPU: what is read and multiplied, and the step itself."""

import sys
from collections.abc import Callable

import pytest
import torch

from kvrelay.bench import gpu_costs, gpu_kernels
from kvrelay.bench.gpu_costs import LLAMA_1B, LLAMA_8B, Decoder
from kvrelay.bench.gpu_step import RandomStep

TINY = Decoder(num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=64, vocab=97)


def test_decode_attention_reads_keys_and_values_once() -> None:
    queries = 2 * 64 * 32 * 128 * 2
    assert gpu_costs.decode_attention_bytes(LLAMA_8B, 64, 4096) == 64 * 4096 * 2 * 8 * 128 * 2 + queries
    assert gpu_costs.decode_attention_bytes(LLAMA_8B, 64, 4096, quantised=True) == 64 * 4096 * 2 * 8 * 132 + queries


def test_prefill_attention_multiplies_what_each_token_sees() -> None:
    seen = sum(range(1, 8))
    assert gpu_costs.prefill_attention_operations(LLAMA_1B, 7) == 32 * seen * (2 * 64 + 2 * 64)


def test_products_read_their_weight() -> None:
    assert gpu_costs.matmul_bytes(1, 10, 100) == 2000 + 220
    assert gpu_costs.matmul_bytes(1, 10, 100, weight_bits=9) == 1125 + 220
    assert gpu_costs.matmul_operations(3, 10, 100) == 6000


def test_a_step_reads_every_parameter() -> None:
    weights = RandomStep(TINY, 1, 5, torch.device("cpu"))
    tensors = [weights._embedding, *(tensor for layer in weights._layers for tensor in layer.values())]
    kv_bytes = 2 * 3 * 5 * 2 * 2 * 16 * 2  # layers, sequences, positions, keys and values, heads, values, bytes
    assert gpu_costs.step_bytes(TINY, 3, 5) == sum(tensor.nbytes for tensor in tensors) + kv_bytes
    assert gpu_costs.step_bytes(LLAMA_1B, 1, 0) / 2 == pytest.approx(1.236e9, rel=1e-3)


def test_shares() -> None:
    rates = gpu_kernels.Rates(copied=1e12, multiplied=1e14)
    assert gpu_costs.share(8.5e11, 1.0, 1e12) == pytest.approx(85.0)
    memory = gpu_kernels.by_memory("a", "b", 5e11, 1.0, rates, "85")
    matrices = gpu_kernels.by_matrices("a", "b", 6e13, 1.0, rates, "60")
    assert (memory["GB/s"], memory["%"], memory["ms"]) == (500.0, 50.0, 1000.0)
    assert (matrices["TFLOP/s"], matrices["%"]) == (60.0, 60.0)
    assert list(memory) == list(matrices)


def test_a_step_draws_a_token_for_each_sequence() -> None:
    """On plain torch; what was drawn is what the next step begins with."""
    torch.manual_seed(3)
    step = RandomStep(TINY, 3, 21, torch.device("cpu"))
    step._norm *= 30  # so that tokens decide, not their noise
    before = [context.kv.clone() for context in step._contexts]
    drawn = []
    for _ in range(3):
        step()
        drawn.append(tuple(step.token_ids.tolist()))
    assert len(set(drawn)) == 3
    assert all(0 <= token < TINY.vocab for tokens in drawn for token in tokens)
    for context, kv in zip(step._contexts, before, strict=True):
        written = (context.kv != kv).any(-1).all(2).all(1).flatten().nonzero().flatten()
        assert written.tolist() == context.slots.sort().values.tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_kernels"])
    with pytest.raises(SystemExit) as ended:
        gpu_kernels.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "The GPU kernels can only be measured on a GPU, and torch sees none here.\n"


def test_everything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On plain torch, of tiny shapes, with one second for each call."""

    def seconds(calls: list[Callable[[], object]]) -> float:
        calls[0]()
        return 1.0

    for name, value in {
        "seconds": seconds,
        "LLAMA_1B": TINY,
        "LLAMA_8B": TINY,
        "DECODE": ((TINY, 2, 20),),
        "PREFILL_TOKENS": (33,),
        "FEW_ROWS": (1,),
        "MANY_ROWS": (5,),
        "STEPS": ((2, 20),),
        "CACHE_BYTES": 5000,
    }.items():
        monkeypatch.setattr(gpu_kernels, name, value)
    rows = list(gpu_kernels.figures(gpu_kernels.Rates(1e9, 1e9), torch.device("cpu")))
    assert {row["what"] for row in rows} == {
        "copy", "torch.mm", "decode attention", "decode attention, int8", "prefill attention", "product",
        "product, int8 groups", "sampling", "decode step, 1B",
    }  # fmt: skip
    assert all(row["%"] > 0 for row in rows)
    assert len({tuple(row) for row in rows}) == 1
