"""How much of a hand-over is not hidden behind the prefill of a long prompt, by each transport, and what digests cost.

A cluster of one prefill and one decode worker computes prompts one at a time; the gateway's metrics tell when prefill
ended and when all KV had arrived, verified. Digests are timed over as many bytes, at both ends, in pieces as they go.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import xxhash
from rich.console import Console

from kvrelay.bench.cluster import running
from kvrelay.bench.load import Load, run, summary
from kvrelay.bench.report import show, write_json

TRANSPORTS = ("shm", "ucx", "zmq")
MAX_HEARTBEAT_S = 10.0
_PHASE = 'kvrelay_phase_seconds_sum{{phase="{}"}}'
PIECE_BYTES = 384 * 1024  # 32 blocks of the bundled model: one layer of a chunk of 512 tokens


def main() -> None:
    """Measures every transport in one run, and prints and writes what came out."""
    options = _arguments()
    rows = [_measure(transport, options) for transport in options.transport]
    show(f"Prompts of {options.input_len} tokens, one at a time", rows)
    write_json(options.json, rows, {**vars(options), "json": str(options.json)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--input-len", type=int, default=3000, help="prompt tokens")
    parser.add_argument("--num-requests", type=int, default=5, help="prompts of each transport")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, default=Path("out/handover.json"), help="where the figures go")
    return parser.parse_args()


def _measure(transport: str, options: argparse.Namespace) -> dict[str, Any]:
    Console(stderr=True).print(f"{transport}: {options.num_requests} prompts of {options.input_len} tokens")
    load = Load(options.num_requests, 1, options.input_len, output_len=2, vocab_size=40000, seed=options.seed)
    warm_up = Load(1, 1, options.input_len, output_len=2, vocab_size=40000, seed=options.seed + 1)
    with running(prefill=1, decode=1, transport=transport) as url:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        asyncio.run(run(url, model, warm_up))
        before = _metrics(url, num_handovers=1)
        timings = asyncio.run(run(url, model, load))
        after = _metrics(url, num_handovers=1 + load.num_requests)
    prefill_s, hand_over_s, num_bytes = (
        _sum(after, name) - _sum(before, name)
        for name in (_PHASE.format("prefill"), _PHASE.format("hand_over"), "kvrelay_transfer_bytes_total")
    )
    ttft_s = sum(timing.ttft_s for timing in timings)
    return {
        "transport": transport,
        "ttft_ms": summary(timings)["ttft_p50_ms"],
        "prefill_ms": 1000 * prefill_s / load.num_requests,
        "hand_over_ms": 1000 * hand_over_s / load.num_requests,
        "%_of_prefill": 100 * hand_over_s / prefill_s,
        "MB": num_bytes / load.num_requests / 1e6,
        "digests_%_of_ttft": 100 * 2 * _digest_s(int(num_bytes)) / ttft_s,
    }


def _metrics(url: str, num_handovers: int) -> dict[str, float]:
    """Every sample by its name with labels, once a heartbeat has told of so many hand-overs."""
    deadline = time.monotonic() + MAX_HEARTBEAT_S
    while time.monotonic() < deadline:
        lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
        metrics = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
        if _sum(metrics, "kvrelay_transfers_total") == num_handovers:
            return metrics
        time.sleep(0.05)
    raise RuntimeError(f"The workers did not tell of {num_handovers} hand-overs within {MAX_HEARTBEAT_S:g} s.")


def _sum(metrics: dict[str, float], name: str) -> float:
    """Over all labels that the name does not fix."""
    return sum(value for each, value in metrics.items() if each.startswith(name))


def _digest_s(num_bytes: int) -> float:
    """Seconds that it takes to digest so many bytes once, in pieces that are in no cache."""
    memory = bytearray(64 * PIECE_BYTES)
    pieces = [memoryview(memory)[first : first + PIECE_BYTES] for first in range(0, len(memory), PIECE_BYTES)]
    for piece in pieces:
        piece[:] = bytes([1]) * PIECE_BYTES
    begin = time.monotonic()
    for number in range(num_bytes // PIECE_BYTES):
        xxhash.xxh3_64_intdigest(pieces[number % len(pieces)])
    return time.monotonic() - begin


if __name__ == "__main__":
    main()
