"""What a gateway alone costs: processor time for each streamed token, and how much later it arrives.

A stand-in worker makes up the tokens, so that nothing else is measured.
"""

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvrelay.bench.children_cpu import child_cpu_s
from kvrelay.bench.cluster import free_port, started
from kvrelay.bench.load import Load, run
from kvrelay.bench.report import show, write_json
from kvrelay.bench.standin import STAND_IN, VOCAB_SIZE, age_us
from kvrelay.bench.verify_arms import Addresses
from kvrelay.children import ChildSpec
from kvrelay.config import GatewaySettings
from kvrelay.up import command_spec

MODEL = "smollm2-135m"


def main() -> None:
    """Measures at each concurrency, prints and writes."""
    options = _arguments()
    rows: list[dict[str, Any]] = []
    with _gateway(options.step_s, options.cache_dir) as (url, cpu_s):
        for concurrency in options.concurrency:
            rows.append(_measure(url, cpu_s, concurrency, options))
            Console(stderr=True).print(f"{concurrency} at a time: {rows[-1]['cpu_us_per_token']:.0f} us a token")
    show("A gateway alone", rows)
    write_json(options.json, rows, {name: str(value) for name, value in vars(options).items()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="streams at a time")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream, one after the other")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--step-s", type=float, default=0.01, help="seconds between two tokens of a stream")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache/kvrelay", help="fetched models")
    parser.add_argument("--json", type=Path, default=Path("out/gateway.json"), help="where the figures go")
    return parser.parse_args()


@contextmanager
def _gateway(step_s: float, cache_dir: Path) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yields the URL of a gateway that has a stand-in worker, and the clock of its processor time."""
    addresses = Addresses(free_port(), free_port())
    settings = GatewaySettings(
        model=MODEL, cache_dir=cache_dir, host="127.0.0.1", port=addresses.http, listen=addresses.at
    )
    standin = ["--gateway", addresses.at, "--model", MODEL, "--cache-dir", str(cache_dir), "--step-s", str(step_s)]
    specs = [
        command_spec("gateway", "gateway", settings, os.environ),
        ChildSpec(STAND_IN, [sys.executable, "-m", "kvrelay.bench.standin", *standin], os.environ),
    ]
    with started(specs, [STAND_IN], addresses.url) as supervisor:
        yield addresses.url, lambda: child_cpu_s(supervisor, "gateway")


def _measure(url: str, cpu_s: Callable[[], float], concurrency: int, options: argparse.Namespace) -> dict[str, Any]:
    load = Load(
        num_requests=options.rounds * concurrency,
        concurrency=concurrency,
        input_len=options.input_len,
        output_len=options.output_len,
        vocab_size=VOCAB_SIZE,
    )
    asyncio.run(run(url, MODEL, replace(load, num_requests=concurrency, seed=1)))  # what is used first is loaded now
    begin_s = cpu_s()
    timings = asyncio.run(run(url, MODEL, load))
    spent_s = cpu_s() - begin_s
    ages_us = [
        age_us(token_id, came_s)
        for timing in timings
        for token_id, came_s in zip(timing.token_ids, timing.token_s, strict=True)
    ]
    return {
        "at_a_time": concurrency,
        "tokens": len(ages_us),
        "cpu_us_per_token": 1e6 * spent_s / len(ages_us),
        "tokens_per_cpu_s": len(ages_us) / spent_s,
        "latency_p50_us": statistics.median(ages_us),
    }


if __name__ == "__main__":
    main()
