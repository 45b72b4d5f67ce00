"""How close the GPU kernels come to what this GPU can: copy bandwidth and matrix rate are measured beside them.

Decode attention and products of few rows are bound by memory, prefill attention and products of many rows by the
matrix units; a decode step as a whole must read its weights and KV. Goals are those of the design.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from kvrelay.bench import gpu_costs
from kvrelay.bench.gpu_costs import LLAMA_1B, LLAMA_8B, Decoder, share
from kvrelay.bench.gpu_step import PagedContext, RandomStep, sampling
from kvrelay.bench.report import show, write_json
from kvrelay.kernels.gumbel import sample_tokens
from kvrelay.kernels.matmul import matmul, quantised_matmul
from kvrelay.kernels.paged_attention import decode_attention, prefill_attention

ROUNDS = 20
COPIED_BYTES = 1 << 30
MATRIX_SIZE = 8192
CACHE_BYTES = 1 << 28  # more than any GPU's cache holds: what is measured comes from memory
DECODE = ((LLAMA_1B, 64, 4096), (LLAMA_8B, 64, 4096), (LLAMA_8B, 1, 4096), (LLAMA_8B, 8, 32768))
PREFILL_TOKENS = (1024, 8192)
FEW_ROWS = (1, 8, 64)
MANY_ROWS = (512, 8192)
STEPS = ((1, 4096), (64, 4096))


@dataclass(frozen=True, slots=True)
class Rates:
    """What the GPU was measured to do."""

    copied: float  # bytes per second, read and written
    multiplied: float  # operations per second, bfloat16


def main() -> None:
    """Measures everything, prints a table and writes it with the settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/gpu_kernels.json"), help="where the figures go")
    parser.add_argument("--seed", type=int, default=1, help="of weights, keys and values")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("The GPU kernels can only be measured on a GPU, and torch sees none here.\n")
        sys.exit(2)
    torch.manual_seed(options.seed)
    device = torch.device("cuda")
    with torch.inference_mode():
        rows = list(figures(measured_rates(device), device))
    show(f"Kernels on {torch.cuda.get_device_name(device)}", rows)
    settings = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "seed": options.seed}
    write_json(options.json, rows, settings)


def measured_rates(device: torch.device) -> Rates:
    """By a plain copy and torch's own product of large matrices."""
    source = torch.randint(0, 255, (COPIED_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * COPIED_BYTES / seconds([lambda: target.copy_(source)])
    a, b = torch.randn((2, MATRIX_SIZE, MATRIX_SIZE), dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    return Rates(copied, 2 * MATRIX_SIZE**3 / seconds([lambda: torch.mm(a, b, out=out)]))


def figures(rates: Rates, device: torch.device) -> Iterator[dict[str, Any]]:
    """All rows of the table, each said aloud once it is there."""
    parts = [part(rates, device) for part in (_decode, _prefill, _few_rows, _many_rows, _sampling, _steps)]
    for row in chain(_copy_and_matrices(rates), *parts):
        sys.stderr.write(f"{row['what']}, {row['shape']}: {row['ms']:.3f} ms\n")
        yield row


def by_memory(what: str, shape: str, num_bytes: float, took_s: float, rates: Rates, goal: str = "") -> dict[str, Any]:
    """A row of something that memory bounds."""
    about = {"what": what, "shape": shape, "ms": 1000 * took_s}
    return {
        **about,
        "GB/s": num_bytes / took_s / 1e9,
        "TFLOP/s": "",
        "%": share(num_bytes, took_s, rates.copied),
        "goal": goal,
    }


def by_matrices(what: str, shape: str, count: float, took_s: float, rates: Rates, goal: str = "") -> dict[str, Any]:
    """A row of something that the matrix units bound."""
    about = {"what": what, "shape": shape, "ms": 1000 * took_s}
    return {
        **about,
        "GB/s": "",
        "TFLOP/s": count / took_s / 1e12,
        "%": share(count, took_s, rates.multiplied),
        "goal": goal,
    }


def seconds(calls: list[Callable[[], object]]) -> float:
    """Of one of several like calls on data of their own, in a CUDA graph: the median of some replays."""
    for call in calls:  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    took = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(float(begin.elapsed_time(end)) / 1000)
    return statistics.median(took) / len(calls)


def _copy_and_matrices(rates: Rates) -> Iterator[dict[str, Any]]:
    copied, multiplied = 2 * COPIED_BYTES, 2 * MATRIX_SIZE**3
    yield by_memory("copy", f"{COPIED_BYTES >> 20} MiB", copied, copied / rates.copied, rates)
    yield by_matrices("torch.mm", f"{MATRIX_SIZE} cubed", multiplied, multiplied / rates.multiplied, rates)


def _decode(rates: Rates, device: torch.device) -> Iterator[dict[str, Any]]:
    for decoder, batch, context in DECODE:
        shape = f"{batch} x {context}, head {decoder.head_dim}"
        for quantised in (False, True):
            num_bytes = gpu_costs.decode_attention_bytes(decoder, batch, context, quantised=quantised)
            calls = [_decoding(decoder, batch, context, quantised, device) for _ in range(1 + CACHE_BYTES // num_bytes)]
            goal = "85" if (batch, context) == (64, 4096) and not quantised else ""
            what = "decode attention, int8" if quantised else "decode attention"
            yield by_memory(what, shape, num_bytes, seconds(calls), rates, goal)


def _decoding(
    decoder: Decoder, batch: int, context: int, quantised: bool, device: torch.device
) -> Callable[[], object]:
    paged = PagedContext.random(decoder, batch, context, device)
    q = torch.randn((batch, decoder.num_heads, decoder.head_dim), dtype=torch.bfloat16, device=device)
    kv, scales = paged.kv, None
    if quantised:
        kv = torch.randint(-127, 128, kv.shape, dtype=torch.int8, device=device)
        scales = torch.rand(kv.shape[:4], device=device)
    return partial(decode_attention, q, kv, paged.block_tables, paged.num_positions, torch.empty_like(q), scales)


def _prefill(rates: Rates, device: torch.device) -> Iterator[dict[str, Any]]:
    for num_tokens in PREFILL_TOKENS:
        paged = PagedContext.random(LLAMA_8B, 1, num_tokens, device)
        q = torch.randn((num_tokens, LLAMA_8B.num_heads, LLAMA_8B.head_dim), dtype=torch.bfloat16, device=device)
        starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        given = (q, paged.kv, paged.block_tables, starts, paged.num_positions, num_tokens, torch.empty_like(q))
        took_s = seconds([partial(prefill_attention, *given)])
        count, goal = gpu_costs.prefill_attention_operations(LLAMA_8B, num_tokens), "60" if num_tokens == 8192 else ""
        yield by_matrices("prefill attention", f"{num_tokens} tokens", count, took_s, rates, goal)


def _few_rows(rates: Rates, device: torch.device) -> Iterator[dict[str, Any]]:
    for name, (outputs, inputs) in LLAMA_8B.projections.items():
        for num_rows in FEW_ROWS:
            shape = f"{num_rows} rows, {name} {outputs} x {inputs}"
            took_s = seconds(list(_products(num_rows, outputs, inputs, device)))
            yield by_memory("product", shape, gpu_costs.matmul_bytes(num_rows, outputs, inputs), took_s, rates)
            took_s = seconds(list(_products_with_codes(num_rows, outputs, inputs, device)))
            num_bytes = gpu_costs.matmul_bytes(num_rows, outputs, inputs, weight_bits=9)
            yield by_memory("product, int8 groups", shape, num_bytes, took_s, rates)


def _many_rows(rates: Rates, device: torch.device) -> Iterator[dict[str, Any]]:
    for name, (outputs, inputs) in LLAMA_8B.projections.items():
        for num_rows in MANY_ROWS:
            took_s = seconds(list(_products(num_rows, outputs, inputs, device)))
            count = gpu_costs.matmul_operations(num_rows, outputs, inputs)
            yield by_matrices("product", f"{num_rows} rows, {name} {outputs} x {inputs}", count, took_s, rates)


def _products(num_rows: int, outputs: int, inputs: int, device: torch.device) -> Iterator[Callable[[], object]]:
    """The same product with as many weights as do not fit into the GPU's cache."""
    x = torch.randn((num_rows, inputs), dtype=torch.bfloat16, device=device)
    out = torch.empty((num_rows, outputs), dtype=torch.bfloat16, device=device)
    for _ in range(1 + CACHE_BYTES // (2 * outputs * inputs)):
        weight = torch.randn((outputs, inputs), dtype=torch.bfloat16, device=device)
        yield partial(matmul, x, weight, None, out)


def _products_with_codes(
    num_rows: int, outputs: int, inputs: int, device: torch.device
) -> Iterator[Callable[[], object]]:
    x = torch.randn((num_rows, inputs), dtype=torch.bfloat16, device=device)
    out = torch.empty((num_rows, outputs), dtype=torch.bfloat16, device=device)
    scales = torch.rand((outputs, inputs // 32), dtype=torch.float16, device=device)
    for _ in range(1 + CACHE_BYTES // (outputs * inputs)):
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=device)
        yield partial(quantised_matmul, x, codes, scales, scales, None, out)


def _sampling(rates: Rates, device: torch.device) -> Iterator[dict[str, Any]]:
    for top_p in (1.0, 0.9):
        logits = torch.randn((64, LLAMA_8B.vocab), device=device) * 3
        out = torch.empty(64, dtype=torch.int64, device=device)
        took_s = seconds([partial(sample_tokens, logits, sampling(64, device, top_p), out)])
        yield by_memory("sampling", f"64 rows, top_p {top_p}", logits.nbytes, took_s, rates)


def _steps(rates: Rates, device: torch.device) -> Iterator[dict[str, Any]]:
    for batch, context in STEPS:
        yield step(LLAMA_1B, batch, context, rates, device)


def step(decoder: Decoder, batch: int, context: int, rates: Rates, device: torch.device) -> dict[str, Any]:
    """A whole decode step; within 1.3 times of what it reads is 77 per cent."""
    took_s = seconds([RandomStep(decoder, batch, context, device)])
    num_bytes = gpu_costs.step_bytes(decoder, batch, context)
    return by_memory("decode step, 1B", f"{batch} x {context}", num_bytes, took_s, rates, "77")


if __name__ == "__main__":
    main()
