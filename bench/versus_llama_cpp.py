"""One stream on one core: KVRelay through its API, and llama.cpp in a process without one, on the same model file.

Both keep the weights as the file has them, in 4 bits; the same prompts, one after the other. The goal is 1.5 times the
tokens a second of llama.cpp, those of the answer after the first.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from kvrelay.bench.cluster import running
from kvrelay.bench.load import Load, run
from kvrelay.bench.report import show, write_json
from kvrelay.checkpoint import resolve

MODEL = "smollm2-135m"
GOAL = 1.5
MAX_S = 300.0

Seconds = list[tuple[float, float]]  # of each prompt: to the first token, and from there to the last


def main() -> None:
    """Measures both, each twice and in turn, prints and writes the ratio."""
    options = _arguments()
    load = Load(options.rounds, 1, options.input_len, options.output_len, vocab_size=40000, seed=options.seed)
    theirs, ours = _llama_cpp(load, options), _kvrelay(load)
    theirs, ours = theirs + _llama_cpp(load, options), ours + _kvrelay(load)
    rows = [_row("llama.cpp", theirs, load), _row("kvrelay", ours, load)]
    show(f"One stream on one core, {load.input_len} tokens in, {load.output_len} out", rows)
    ratio = rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    show("Ratio", [{"of tokens/s": ratio, "goal": GOAL}])
    write_json(options.json, rows, {name: str(value) for name, value in vars(options).items()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", type=Path, required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=5, help="prompts; the median counts")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=64, help="generated tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvrelay", help="where the model is")
    parser.add_argument("--json", type=Path, default=Path("out/versus_llama_cpp.json"), help="where the figures go")
    return parser.parse_args()


def _llama_cpp(load: Load, options: argparse.Namespace) -> Seconds:
    """Raises CalledProcessError if that Python cannot run llama.cpp, TimeoutExpired if it takes minutes."""
    path = resolve(MODEL, options.cache_dir).path
    job = {"model": str(path), "threads": 1, "prompts": load.prompts(), "output_len": load.output_len}
    script = Path(__file__).with_name("llama_cpp_stream.py")
    result = subprocess.run(
        [str(options.llama_python), str(script), json.dumps(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=MAX_S,
        check=True,
    )
    return [(first, rest) for first, rest in json.loads(result.stdout.splitlines()[-1])]


def _kvrelay(load: Load) -> Seconds:
    with running(model=MODEL, prefill=0, decode=0, both=1, quantization="auto") as url:  # one worker, on a core
        asyncio.run(run(url, MODEL, Load(2, 1, 16, 4, vocab_size=40000, seed=load.seed + 1)))
        timings = asyncio.run(run(url, MODEL, load))
    return [(timing.ttft_s, timing.token_s[-1] - timing.token_s[0]) for timing in timings]


def _row(arm: str, seconds: Seconds, load: Load) -> dict[str, Any]:
    first_s = statistics.median(first for first, _ in seconds)
    rest_s = statistics.median(rest for _, rest in seconds)
    return {"arm": arm, "ttft_ms": 1000 * first_s, "tokens_per_s": (load.output_len - 1) / rest_s}


if __name__ == "__main__":
    main()
