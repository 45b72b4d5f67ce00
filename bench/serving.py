"""Speed of this checkout through HTTP, and of other systems in the same run: tokens/s, TTFT and ITL under load.

Two loads: so many requests at a time, and short chats while long prompts come. Every arm has the whole machine; those
in 4 bit keep the weights as the model's file has them, the others compute in the precision of those compared with.
"""

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from kvrelay.bench.cluster import running
from kvrelay.bench.interference import LongPrompts, interfere
from kvrelay.bench.load import Load, run, summary
from kvrelay.bench.peers import PEERS, running_peer
from kvrelay.bench.report import show, write_json

OURS: dict[str, dict[str, object]] = {
    "1P1D": {"prefill": 1, "decode": 1},
    "both": {"prefill": 0, "decode": 0, "both": 1, "threads": 2},
    "1P1D 4 bit": {"prefill": 1, "decode": 1, "quantization": "auto"},
    "both 4 bit": {"prefill": 0, "decode": 0, "both": 1, "threads": 2, "quantization": "auto"},
}
HIGHER_IS_BETTER = ("tokens_per_s",)
COMPARED = ("tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms")


def main() -> None:
    """Runs every arm on the same machine in one run, and prints and writes what came out."""
    options = _arguments()
    rows: list[dict[str, Any]] = []
    for arm in options.arm + (options.peer if options.peers else []):
        with _server(arm, options.peers) as url:
            rows += _measure(arm, url, options)
        write_json(options.json, rows, {name: str(value) for name, value in vars(options).items()})  # each arm: minutes
    show(f"{options.input_len} tokens in, {options.output_len} out", rows)
    for peer in options.peer if options.peers else ():
        show(f"Times as fast as {peer} (above 1: faster, or sooner)", ratios(rows, peer))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", nargs="+", choices=list(OURS), default=list(OURS), help="how the workers are placed")
    parser.add_argument("--peer", nargs="*", choices=list(PEERS), default=list(PEERS), help="which, with --peers")
    parser.add_argument("--at-a-time", nargs="*", type=int, default=[1, 8, 32], help="requests; none for no such load")
    parser.add_argument("--no-interference", action="store_true", help="leave out short chats beside long prompts")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=64, help="generated tokens")
    parser.add_argument("--peers", type=Path, help="folder with the scripts that start other systems")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, default=Path("out/serving.json"), help="where the figures go")
    return parser.parse_args()


def _server(arm: str, peers: Path) -> AbstractContextManager[str]:
    return running(**OURS[arm]) if arm in OURS else running_peer(peers, arm)


def _measure(arm: str, url: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    for index, concurrency in enumerate(options.at_a_time):
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
        figures = summary(asyncio.run(run(url, model, load)))
        no_long = dict.fromkeys(LongPrompts().figures, "")
        yield _told({"arm": arm, "load": f"{concurrency} at a time", **figures, **no_long})
    if options.no_interference:
        return
    figures = asyncio.run(interfere(partial(run, url, model), options.seed + 1000))
    yield _told({"arm": arm, "load": "interference", **figures})


def _told(row: dict[str, Any]) -> dict[str, Any]:
    Console(stderr=True).print(f"{row['arm']}, {row['load']}: {row['tokens_per_s']:.1f} tokens/s")
    return row


def ratios(rows: list[dict[str, Any]], peer: str) -> list[dict[str, Any]]:
    """Every other arm beside the peer under the same load: above 1 where it does better."""
    of_peer = {row["load"]: row for row in rows if row["arm"] == peer}
    return [
        {
            "arm": row["arm"],
            "load": row["load"],
            **{name: _better(name, row[name], of_peer[row["load"]][name]) for name in COMPARED},
        }
        for row in rows
        if row["arm"] not in PEERS
    ]


def _better(name: str, ours: float, theirs: float) -> float:
    return ours / theirs if name in HIGHER_IS_BETTER else theirs / ours


if __name__ == "__main__":
    main()
