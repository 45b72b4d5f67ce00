"""What a cluster costs outside its kernels: a decode step's time around them, and processor time when it is idle.

A step is one of a colocated worker's real compute loop, in this process and pinned as `kvrelay up` pins a worker, while
every sequence decodes. The idle cluster is that of `kvrelay up` with a prefill and a decode worker.
"""

import argparse
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from kvrelay.bench.children_cpu import child_cpu_s
from kvrelay.bench.cluster import free_port, started
from kvrelay.bench.load import Load
from kvrelay.bench.overheads_steps import StepLoop, figures, pin
from kvrelay.bench.report import show, write_json
from kvrelay.bench.verify_arms import Addresses
from kvrelay.config import UpSettings, WorkerSettings
from kvrelay.types import Role
from kvrelay.up import child_specs, worker_names

ALL = "all"


def main() -> None:
    """Measures both, prints tables and writes them. The idle cluster comes first, since children inherit a core."""
    options = _arguments()
    say = Console(stderr=True).print
    say(f"Starting a cluster, which is then left alone for {options.idle_s:g} s.")
    idle = _idle(options)
    say(f"The idle cluster takes {idle[-1]['cpu_percent']:.2f} % of a core.")
    pin(options.threads)
    steps: list[dict[str, Any]] = []
    for quantization in options.quantization:
        loop = StepLoop(_worker(quantization, options))
        for num_sequences, temperature in product(options.sequences, options.temperature):
            arm = {"quantization": quantization, "sequences": num_sequences, "temperature": temperature}
            measured = figures(loop.run(_load(num_sequences, loop, options), temperature))
            steps.append({**arm, **measured})
            say(f"{arm}: {measured['outside_ms']:.2f} of {measured['step_ms']:.2f} ms are outside kernels.")
    show("A decode step", steps)
    show("An idle cluster", idle)
    write_json(options.json, [*steps, *idle], {name: str(value) for name, value in vars(options).items()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quantization", nargs="+", default=["none", "auto"], help="of the weights")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32], help="that decode together")
    parser.add_argument("--threads", type=int, default=1, help="of the worker")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="0 takes the likeliest token")
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds for which a cluster is left alone")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvrelay", help="fetched models")
    parser.add_argument("--json", type=Path, default=Path("out/overheads.json"), help="where the figures go")
    return parser.parse_args()


def _worker(quantization: str, options: argparse.Namespace) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            "role": Role.BOTH,
            "cache_dir": options.cache_dir,
            "threads": options.threads,
            "quantization": quantization,
            "max_num_seqs": max(options.sequences),
        }
    )


def _load(num_sequences: int, loop: StepLoop, options: argparse.Namespace) -> Load:
    return Load(
        num_requests=num_sequences,
        concurrency=num_sequences,
        input_len=options.input_len,
        output_len=options.output_len,
        vocab_size=loop.vocab_size,
        seed=num_sequences,
    )


def _idle(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Processor time of each process of an idle cluster, and of all, as a share of one core."""
    addresses = Addresses(free_port(), free_port())
    settings = UpSettings(
        cache_dir=options.cache_dir, host="127.0.0.1", port=addresses.http, listen=addresses.at, prefill=1, decode=1
    )
    specs, workers = child_specs(settings, os.environ), [name for name, _ in worker_names(settings)]
    with started(specs, workers, addresses.url) as supervisor:
        begin_s, before_s = time.monotonic(), [child_cpu_s(supervisor, spec.name) for spec in specs]
        time.sleep(options.idle_s)
        after_s, end_s = [child_cpu_s(supervisor, spec.name) for spec in specs], time.monotonic()
    spent_s = {spec.name: after - before for spec, before, after in zip(specs, before_s, after_s, strict=True)}
    spent_s[ALL] = sum(spent_s.values())
    return [{"process": name, "cpu_percent": 100 * cpu_s / (end_s - begin_s)} for name, cpu_s in spent_s.items()]


if __name__ == "__main__":
    main()
