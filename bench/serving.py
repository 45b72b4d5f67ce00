"""Speed of this checkout through HTTP: output tokens a second, TTFT and ITL at 1, 8 and 32 requests at a time."""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from kvrelay.bench.cluster import running
from kvrelay.bench.load import Load, run, summary
from kvrelay.bench.report import show, write_json

CONCURRENCY = (1, 8, 32)
ARMS: dict[str, dict[str, int]] = {"1P1D": {"prefill": 1, "decode": 1}, "both": {"prefill": 0, "decode": 0, "both": 1}}


def main() -> None:
    """Runs every arm on the same machine in one run, and prints and writes what came out."""
    options = _arguments()
    rows = [row for arm in options.arm for row in _measure(arm, options)]
    show(f"{options.input_len} tokens in, {options.output_len} out", rows)
    write_json(options.json, rows, {**vars(options), "json": str(options.json)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", nargs="+", choices=list(ARMS), default=list(ARMS), help="how the workers are placed")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=64, help="generated tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, default=Path("out/serving.json"), help="where the figures go")
    return parser.parse_args()


def _measure(arm: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with running(**ARMS[arm]) as url:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        for index, concurrency in enumerate(CONCURRENCY):
            load = Load(
                num_requests=2 * concurrency if concurrency > 1 else 4,
                concurrency=concurrency,
                input_len=options.input_len,
                output_len=options.output_len,
                vocab_size=40000,
                seed=options.seed + 2 * index,  # prompts of its own, since those of earlier rows are cached
            )
            warm_up = replace(load, num_requests=concurrency, output_len=4, seed=load.seed + 1)
            asyncio.run(run(url, model, warm_up))
            timings = asyncio.run(run(url, model, load))
            rows.append({"arm": arm, "at_a_time": concurrency, "requests": load.num_requests, **summary(timings)})
            Console(stderr=True).print(f"{arm}, {concurrency} at a time: {rows[-1]['tokens_per_s']:.1f} tokens/s")
    return rows


if __name__ == "__main__":
    main()
