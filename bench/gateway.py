"""What a gateway alone costs: processor time for each streamed token, and how much later it arrives.

A stand-in worker makes up the tokens, so that nothing else is measured.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from kvrelay.bench.cluster import free_port
from kvrelay.bench.report import show, write_json
from kvrelay.bench.standin import age_us

READY_S = 60.0


def main() -> None:
    """Measures at each concurrency, prints and writes."""
    options = _arguments()
    rows: list[dict[str, Any]] = []
    with _gateway(options.step_s, options.cache_dir) as (url, pid):
        for concurrency in options.concurrency:
            rows.append(asyncio.run(_measure(url, pid, concurrency, options)))
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
def _gateway(step_s: float, cache_dir: Path) -> Iterator[tuple[str, int]]:
    """Yields the URL and the process number of a gateway that has a stand-in worker."""
    port, workers = free_port(), f"tcp://127.0.0.1:{free_port()}"
    gateway = _python("kvrelay", "gateway", f"--port={port}", f"--listen={workers}", f"--cache-dir={cache_dir}")
    standin = _python("kvrelay.bench.standin", f"--gateway={workers}", f"--step-s={step_s}", f"--cache-dir={cache_dir}")
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, gateway, standin)
        yield url, gateway.pid
    finally:
        for process in (standin, gateway):
            process.terminate()
            process.wait(30)


def _python(module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", module, *arguments], stderr=subprocess.DEVNULL)


def _wait_until_ready(url: str, *processes: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError("The gateway did not get ready; start `kvrelay gateway` by hand to see why.")


async def _measure(url: str, pid: int, concurrency: int, options: argparse.Namespace) -> dict[str, Any]:
    ages_us: list[int] = []
    async with httpx.AsyncClient(base_url=url, timeout=READY_S) as client:
        await asyncio.gather(*(_stream(client, options, []) for _ in range(concurrency)))  # connections are open now
        cpu_s = _cpu_s(pid)
        for _ in range(options.rounds):
            await asyncio.gather(*(_stream(client, options, ages_us) for _ in range(concurrency)))
        cpu_s = _cpu_s(pid) - cpu_s
    return {
        "at_a_time": concurrency,
        "tokens": len(ages_us),
        "cpu_us_per_token": 1e6 * cpu_s / len(ages_us),
        "tokens_per_cpu_s": len(ages_us) / cpu_s,
        "latency_p50_us": statistics.median(ages_us),
    }


async def _stream(client: httpx.AsyncClient, options: argparse.Namespace, ages_us: list[int]) -> None:
    body = {
        "prompt": [7] * options.input_len,
        "max_tokens": options.output_len,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now_s = time.monotonic()
                ages_us += [age_us(token, now_s) for token in json.loads(line[6:])["choices"][0]["token_ids"]]


def _cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far, in its own and in the kernel's code."""
    clock = ~pid << 3 | 2  # as Linux' clock_getcpuclockid(3), which Python does not offer, makes it
    return time.clock_gettime(clock)


if __name__ == "__main__":
    main()
