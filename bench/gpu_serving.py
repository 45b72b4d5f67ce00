"""A random Llama of 1 billion parameters on one GPU, from HTTP to its kernels: colocated, and disaggregated as 1P1D.

Both answer the same requests, and every token id and bit of logprobs must be the same. A decode step is measured as a
worker computes it, beside the bytes that it must read at the bandwidth of a copy.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvrelay.bench import gpu_costs
from kvrelay.bench.cluster import running
from kvrelay.bench.gpu_costs import LLAMA_1B, Decoder
from kvrelay.bench.gpu_engine import load_runner, step_seconds
from kvrelay.bench.gpu_kernels import Rates, by_memory, measured_rates
from kvrelay.bench.gpu_model import write_random_model
from kvrelay.bench.load import Load, run, summary
from kvrelay.bench.report import show, write_json
from kvrelay.bench.verify_client import ask
from kvrelay.bench.verify_compare import Comparison
from kvrelay.bench.verify_plan import Limits, make_plan
from kvrelay.model.runner import ModelRunner

ARMS: Mapping[str, Mapping[str, object]] = {
    "both": {"prefill": 0, "decode": 0, "both": 1},
    "1P1D": {"prefill": 1, "decode": 1},
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    decoder: Decoder = LLAMA_1B
    max_model_len: int = 8192
    steps: tuple[tuple[int, int], ...] = ((1, 1024), (1, 4096), (64, 4096))  # sequences, positions of each
    steps_kv_bytes: int = 9 << 30
    loads: tuple[int, ...] = (1, 32)  # requests at a time
    input_len: int = 512
    output_len: int = 256
    num_questions: int = 120
    chunk: int = 2048  # prompt tokens of a step: a GPU computes fewer before the next ones are launched
    served_kv_bytes: int = 4 << 30  # of each worker


def main() -> None:
    """Measures everything, prints tables and writes them with the settings. Exits with 1 if answers differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/gpu_serving.json"), help="where the figures go")
    parser.add_argument("--seed", type=int, default=1, help="of weights and requests")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("This needs a GPU, and torch sees none here.\n")
        sys.exit(2)
    device, sizes = torch.device("cuda"), Sizes()
    with torch.inference_mode():
        rates = measured_rates(device)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "random-1b"
        write_random_model(model, sizes.decoder, sizes.max_model_len, options.seed, device)
        steps = list(step_rows(_runner(model, sizes), sizes, rates))
        gc.collect()  # recorded steps and their network name each other
        torch.cuda.empty_cache()
        served, comparison = serve(model, sizes, options.seed, device="cuda")
    name = torch.cuda.get_device_name(device)
    show(f"Decode steps of a worker on {name}", steps)
    show(f"{sizes.input_len} tokens in, {sizes.output_len} out", served)
    told = f"{comparison.requests} requests, {comparison.mismatches} mismatches"
    sys.stdout.write(f"{told}{''.join(f'; {arm.name}: {arm.first}' for arm in comparison.arms if arm.first)}\n")
    write_json(
        options.json,
        [*steps, *served],
        {
            "gpu": name,
            "torch": torch.__version__,
            "seed": options.seed,
            "requests": comparison.requests,
            "mismatches": comparison.mismatches,
        },
    )
    sys.exit(1 if comparison.mismatches else 0)


def _runner(model: Path, sizes: Sizes) -> ModelRunner:
    max_rows = max(batch for batch, _ in sizes.steps)
    return load_runner(model, model.parent / "cache", "cuda", max_rows, sizes.steps_kv_bytes)


def step_rows(runner: ModelRunner, sizes: Sizes, rates: Rates) -> Iterator[dict[str, Any]]:
    """Decode steps beside what they must read; within 1.3 times of it is 77 per cent."""
    for batch, context in sizes.steps:
        num_bytes, took_s = gpu_costs.step_bytes(sizes.decoder, batch, context), step_seconds(runner, batch, context)
        sys.stderr.write(f"decode step, {batch} x {context}: {1000 * took_s:.3f} ms\n")
        yield by_memory("decode step of a worker", f"{batch} x {context}", num_bytes, took_s, rates, "77")


def serve(model: Path, sizes: Sizes, seed: int, device: str) -> tuple[list[dict[str, Any]], Comparison]:
    """Speed under load of every arm, and what came of comparing their answers, those under load too."""
    rows: list[dict[str, Any]] = []
    comparison, known = Comparison(), dict[int, list[tuple[int, ...]]]()
    limits = Limits(sizes.decoder.vocab, sizes.max_model_len)
    questions = make_plan(seed, sizes.num_questions, max(sizes.loads), limits)
    for arm, workers in ARMS.items():
        options = {**workers, "model": model, "cache_dir": model.parent / "cache", "device": device, "threads": 2}
        with running(**options, kv_memory=sizes.served_kv_bytes, max_batch_tokens=sizes.chunk) as url:
            counted = comparison.begin(arm)
            ask(url, questions, comparison.add)
            for concurrency in sizes.loads:
                row, answers = _measured(url, model.name, sizes, concurrency, seed)
                differing = sum(map(tuple.__ne__, known.setdefault(concurrency, answers), answers))
                counted.requests += len(answers)
                counted.mismatches += differing
                rows.append({"arm": arm, "at_a_time": concurrency, **row, "other_ids": differing})
                sys.stderr.write(f"{arm}, {concurrency} at a time: {row['tokens_per_s']:.1f} tokens/s\n")
    return rows, comparison


def _measured(
    url: str, model: str, sizes: Sizes, concurrency: int, seed: int
) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    load = Load(
        num_requests=2 * concurrency,
        concurrency=concurrency,
        input_len=sizes.input_len,
        output_len=sizes.output_len,
        vocab_size=sizes.decoder.vocab,
        seed=seed + concurrency,
    )
    timings = asyncio.run(run(url, model, load))
    return summary(timings), [timing.token_ids for timing in timings]


if __name__ == "__main__":
    main()
