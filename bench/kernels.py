"""How fast the native linear layers are on this machine, beside torch's and beside what memory and processor allow.

The shapes are those of the bundled model, all layers of one step, each with weights of its own as in a model. The best
of several rounds counts, since whatever else runs only adds.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kvrelay.bench.report import show, write_json
from kvrelay.kernels.linear import FORM_NUMBERS, LinearKernels
from kvrelay.kernels.linear_packing import Form, PackedWeights, packed_shape
from kvrelay.kernels.native_library import NativeLibrary, load_native

NUM_LAYERS = 30
SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}  # outputs, columns
LM_HEAD = (49152, 576)
MAX_LM_HEAD_ROWS = 32  # one for each sequence, however long its prompt
TORCH = "torch bf16"
PRODUCTS_PER_LANE = {Form.INT4: 4, Form.INT8: 4, Form.BF16: 2, Form.FP32: 1}

Layer = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    """Measures all in one run, prints a table and writes it with the settings."""
    options = _arguments()
    torch.set_num_threads(options.threads)
    native = load_native(options.cache_dir)
    if native is None:
        sys.exit("There are no native kernels to measure; the line above says why.")
    rows = [
        row
        for kind in [*options.form, TORCH]
        for row in _rows_of(kind, native, options.threads, options.rows, options.rounds)
    ]
    shown = [{name: value for name, value in row.items() if name != "layers_us"} for row in rows]
    show(f"All linear layers of a step, level {native.level.name}, {options.threads} threads", shown)
    sys.stdout.write(f"One core reads memory at {_read_gb_per_s(native, options.rounds):.1f} GB/s.\n")
    write_json(options.json, rows, {name: str(value) for name, value in vars(options).items()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", nargs="*", type=Form, default=list(Form), help="of the weights")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 256, 1024], help="tokens at a time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="the best counts")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvrelay")
    parser.add_argument("--json", type=Path, default=Path("out/kernels.json"), help="where the figures go")
    return parser.parse_args()


def _rows_of(
    kind: Form | str, native: NativeLibrary, num_threads: int, counts: list[int], rounds: int
) -> Iterator[dict[str, Any]]:
    make = _torch_layer if kind == TORCH else _native_layers(Form(kind), LinearKernels(native, num_threads))
    layers = {name: [make(*shape) for _ in range(NUM_LAYERS)] for name, shape in SHAPES.items()}
    layers["lm_head"] = [make(*LM_HEAD)]
    peak = None if kind == TORCH else num_threads * _peak(native, Form(kind), rounds)
    for num_rows in counts:
        seconds = {name: _best_s(each, _activations(kind, name, num_rows), rounds) for name, each in layers.items()}
        products = sum(_products(name, num_rows) for name in layers)
        total = sum(seconds.values())
        yield {
            "weights": str(kind),
            "rows": num_rows,
            "ms": total * 1e3,
            "gb_per_s": _num_bytes(kind) / total / 1e9,
            "gproducts_per_s": products / total / 1e9,
            "percent_of_peak": "" if peak is None else 100 * products / total / peak,
            "layers_us": {name: each / len(layers[name]) * 1e6 for name, each in seconds.items()},
        }


def _native_layers(form: Form, kernels: LinearKernels) -> Callable[[int, int], Layer]:
    def make(outputs: int, columns: int) -> Layer:
        tiles = torch.randint(0, 60, packed_shape(form, outputs, columns), dtype=torch.uint8)  # floats of any kind
        weights = PackedWeights(form, outputs, columns, tiles)
        return lambda x: kernels(x, weights)

    return make


def _torch_layer(outputs: int, columns: int) -> Layer:
    weights = torch.randn(outputs, columns).to(torch.bfloat16)
    return lambda x: torch.nn.functional.linear(x, weights)


def _shape(name: str) -> tuple[int, int]:
    return LM_HEAD if name == "lm_head" else SHAPES[name]


def _num_rows(name: str, num_rows: int) -> int:
    return min(num_rows, MAX_LM_HEAD_ROWS) if name == "lm_head" else num_rows


def _activations(kind: Form | str, name: str, num_rows: int) -> torch.Tensor:
    x = torch.randn(_num_rows(name, num_rows), _shape(name)[1])
    return x.to(torch.bfloat16) if kind == TORCH else x


def _products(name: str, num_rows: int) -> int:
    outputs, columns = _shape(name)
    return outputs * columns * _num_rows(name, num_rows) * (1 if name == "lm_head" else NUM_LAYERS)


def _num_bytes(kind: Form | str) -> int:
    form = Form.BF16 if kind == TORCH else Form(kind)
    layer = sum(tiles * tile_bytes for tiles, tile_bytes in (packed_shape(form, *shape) for shape in SHAPES.values()))
    tiles, tile_bytes = packed_shape(form, *LM_HEAD)
    return NUM_LAYERS * layer + tiles * tile_bytes


def _best_s(layers: list[Layer], x: torch.Tensor, rounds: int) -> float:
    """The time of all of these layers, one after the other: the sum of the best time of each."""
    best = [float("inf")] * len(layers)
    for _, (i, layer) in product(range(rounds), enumerate(layers)):
        start = time.perf_counter()
        layer(x)
        best[i] = min(best[i], time.perf_counter() - start)
    return sum(best)


def _peak(native: NativeLibrary, form: Form, rounds: int) -> float:
    """Products a second that one core computes without any memory."""
    function, times = native.function("kvrelay_peak", "iip"), 200_000
    best = _best_s([_calling(function, FORM_NUMBERS[form], times)], torch.zeros(1), 3 * rounds)
    return times * 12 * 16 * PRODUCTS_PER_LANE[form] / best


def _read_gb_per_s(native: NativeLibrary, rounds: int) -> float:
    """How fast one core reads what is in no cache, in parts of 1 MiB, of which each counts at its best as layers do."""
    memory = torch.zeros(256, 2**18)
    function = native.function("kvrelay_read", "pip")
    parts = [_calling(function, part.data_ptr(), part.numel()) for part in memory]
    return memory.nbytes / _best_s(parts, torch.zeros(1), rounds) / 1e9


def _calling(function: Callable[..., None], *arguments: int) -> Layer:
    def call(result: torch.Tensor) -> torch.Tensor:
        function(*arguments, result.data_ptr())
        return result

    return call


if __name__ == "__main__":
    main()
