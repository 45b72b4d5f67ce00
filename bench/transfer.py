"""How fast KV is handed over, offer to acknowledgement, by each transport, beside the limit of the same path.

Two processes, the real state machines, transports and control threads, and no model: the prompt is computed already.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from kvrelay.bench import transfer_limit, transfer_limit_ucx, transfer_node
from kvrelay.bench.report import show, write_json
from kvrelay.types import KVLayout

SHAPES = {
    "bundled": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16"),
    "8B": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16"),
}
TRANSPORTS = ("zmq", "ucx", "shm")
TOKENS = (128, 1024, 8192, 32768)
WARM_UPS = 2
NIXL_S = 300.0
# Each as a user gets it, and with the digests that KVRelay always makes; UCX takes the shortest way, or TCP alone.
NIXL = {"nixl": (False, ""), "nixl+digest": (True, ""), "nixl tcp": (False, "tcp"), "nixl tcp+digest": (True, "tcp")}


def main() -> None:
    """Measures all in one run, prints a table and writes it with the settings."""
    options = _arguments()
    rows = []
    for shape, num_tokens in product(options.shape, options.tokens):
        for row in _rows(shape, num_tokens, options) if _fits(SHAPES[shape], num_tokens) else ():
            rows.append(row)
            sys.stderr.write(f"{shape}, {num_tokens} tokens, {row['transport']}: {row['ms']:.1f} ms\n")
    show("Hand-over of a computed prompt, offer to acknowledgement", rows)
    if options.nixl_python is None:
        sys.stdout.write("Without rows of NIXL: --nixl-python names a Python that has it.\n")
    write_json(options.json, rows, {name: str(value) for name, value in vars(options).items()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="of the KV cache")
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of the prompt")
    parser.add_argument("--rounds", type=int, default=7, help="hand-overs of each kind; the median counts")
    parser.add_argument("--nixl-python", type=Path, help="a Python with nixl, and xxhash for its rows with digests")
    parser.add_argument("--json", type=Path, default=Path("out/transfer.json"), help="where the figures go")
    return parser.parse_args()


def _rows(shape: str, num_tokens: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    layout = SHAPES[shape]
    num_blocks = layout.num_blocks(num_tokens)
    num_bytes = num_blocks * layout.block_bytes * layout.num_layers
    about = {"shape": shape, "tokens": num_tokens, "MiB": num_bytes / 2**20}
    for transport in options.transport:
        limit_s = _limit(transport, layout, num_blocks, options.rounds)
        seconds = _hand_over(transport, layout, num_tokens, options.rounds)
        yield {**about, **_figures(transport, num_bytes, seconds), **_beside(limit_s, seconds)}
    for name in NIXL if options.nixl_python else ():
        seconds = _nixl(options.nixl_python, name, layout, num_blocks, options.rounds)
        yield {**about, **_figures(name, num_bytes, seconds), **dict.fromkeys(_beside(1.0, 1.0), "")}


def _figures(transport: str, num_bytes: int, seconds: float) -> dict[str, Any]:
    return {"transport": transport, "ms": 1000 * seconds, "GB/s": num_bytes / seconds / 1e9}


def _beside(limit_s: float, seconds: float) -> dict[str, Any]:
    return {"limit ms": 1000 * limit_s, "% of limit": 100 * limit_s / seconds}


def _nixl(python: Path, name: str, layout: KVLayout, num_blocks: int, rounds: int) -> float:
    """Median seconds of a hand-over by NIXL, in a process of another Python.

    Raises:
        CalledProcessError: it cannot run NIXL, or not this.
        TimeoutExpired: NIXL hangs.
    """
    digest, tls = NIXL[name]
    job = {
        "layers": layout.num_layers,
        "block_bytes": layout.block_bytes,
        "num_blocks": num_blocks,
        "piece_blocks": max(1, transfer_limit.PIECE_BYTES // layout.block_bytes),
        "rounds": WARM_UPS + rounds,
        "digest": digest,
    }
    script = Path(__file__).with_name("transfer_nixl.py")
    environment = {**os.environ, **({"UCX_TLS": tls} if tls else {})}
    command = [str(python), str(script), json.dumps(job)]
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=NIXL_S, check=True
    )
    seconds: list[float] = json.loads(result.stdout.splitlines()[-1])
    return statistics.median(seconds[WARM_UPS:])


def _hand_over(transport: str, layout: KVLayout, num_tokens: int, rounds: int) -> float:
    num_blocks = layout.num_blocks(num_tokens)
    with _process(transfer_node.receive, transport, layout, num_blocks + 1) as peer:
        node = transfer_node.SendingNode(transport, layout, num_blocks)
        return _median(lambda: node.hand_over(peer, num_tokens), rounds)


def _limit(transport: str, layout: KVLayout, num_blocks: int, rounds: int) -> float:
    with _process(transfer_limit.receive, transport, layout, num_blocks) as address:
        sender = _plain_sender(transport, address, layout, num_blocks)
        seconds = _median(sender.hand_over, rounds)
    sender.close()  # not before its receiver is gone, which would take that for an error
    return seconds


def _plain_sender(
    transport: str, address: Any, layout: KVLayout, num_blocks: int
) -> transfer_limit.PlainSender | transfer_limit_ucx.PlainUcxSender:
    if transport != "ucx":
        return transfer_limit.PlainSender(transport, address, layout, num_blocks)
    memory = transfer_node.random_memory(layout, num_blocks)
    return transfer_limit_ucx.PlainUcxSender(address, memory, transfer_limit.pieces(layout, num_blocks))


def _median(hand_over: Callable[[], float], rounds: int) -> float:
    """Of the rounds after the first few, which touch memory for the first time."""
    seconds = [hand_over() for _ in range(WARM_UPS + rounds)]
    return statistics.median(seconds[WARM_UPS:])


@contextmanager
def _process(target: Callable[..., None], transport: str, layout: KVLayout, num_blocks: int) -> Iterator[Any]:
    """A receiving process; gives what it says about where it is, and ends it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, transport, layout, num_blocks), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _fits(layout: KVLayout, num_tokens: int) -> bool:
    """Sender and receiver hold the prompt once each, and a third time is on its way at most."""
    needed = 3 * layout.num_blocks(num_tokens) * layout.block_bytes * layout.num_layers
    return needed < _available_bytes()


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not tell how much memory is available.")


if __name__ == "__main__":
    main()
