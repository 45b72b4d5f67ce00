"""How long native attention takes to decode a token of each sequence in every layer, by the type of KV.

The shape is the bundled model's. Every layer and sequence has KV of its own, as in a model. Types take turns, and the
best round of each counts, since whatever else runs only adds.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kvrelay.bench.report import show, write_json
from kvrelay.kernels.attention import AttentionKernel, PagedRows
from kvrelay.kernels.native_library import load_native
from kvrelay.kernels.quantized_kv import quantize_kv

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
KV_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def main() -> None:
    """Measures all in one run, prints a table and writes it with the settings."""
    options = _arguments()
    native = load_native(options.cache_dir)
    if native is None:
        sys.exit("There are no native kernels to measure; the line above says why.")
    kernel = AttentionKernel(native, options.threads)
    rows = [row for count in options.rows for row in _rows_of(kernel, count, options.context, options.rounds)]
    show(f"Attention of a step over {options.context} tokens each, level {native.level.name}", rows)
    write_json(options.json, rows, {name: str(value) for name, value in vars(options).items()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32], help="sequences at a time")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="the best counts")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvrelay")
    parser.add_argument("--json", type=Path, default=Path("out/attention.json"), help="where the figures go")
    return parser.parse_args()


def _rows_of(kernel: AttentionKernel, num_rows: int, context: int, rounds: int) -> list[dict[str, Any]]:
    width = -(-context // BLOCK_SIZE)
    tables = [range(first, first + width) for first in range(0, num_rows * width, width)]
    rows = PagedRows.build([(context - 1, context)] * num_rows, tables, BLOCK_SIZE, num_rows * width)
    query = torch.randn(num_rows, NUM_HEADS, HEAD_DIM)
    caches = {name: _cache(dtype, num_rows * width) for name, dtype in KV_TYPES.items()}
    best_s = dict.fromkeys(caches, float("inf"))
    for _ in range(rounds):
        for name, cache in caches.items():
            start = time.perf_counter()
            for layer in cache:
                kernel(query, layer, rows, torch.float32)
            best_s[name] = min(best_s[name], time.perf_counter() - start)
    return [
        {
            "kv": name,
            "rows": num_rows,
            "ms": best_s[name] * 1e3,
            "gb_per_s": cache.nbytes / best_s[name] / 1e9,
            "bytes_per_token": cache.nbytes // (num_rows * width * BLOCK_SIZE),
        }
        for name, cache in caches.items()
    ]


def _cache(dtype: torch.dtype, num_blocks: int) -> torch.Tensor:
    """`[layers, num_blocks, 2, num_kv_heads, block_size, ...]`; each layer is a copy of one."""
    kv = torch.randn(num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    layer = quantize_kv(kv) if dtype == torch.int8 else kv.to(dtype)
    return layer.repeat(NUM_LAYERS, *(1 for _ in layer.shape)).view(NUM_LAYERS, *layer.shape)


if __name__ == "__main__":
    main()
