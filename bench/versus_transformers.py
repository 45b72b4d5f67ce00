"""Continuous batching against one stream: decode rate of 32 sequences here, and of transformers' `generate` on one.

Both in bfloat16, both on the same cores, the same prompts, prefill excluded, one after the other in one run. The goal
is a ratio of at least 5.
"""

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from kvrelay.bench.cluster import running
from kvrelay.bench.load import Load, decode_rate, run
from kvrelay.bench.report import show, write_json
from kvrelay.checkpoint import resolve

MODEL = "smollm2-135m"
GOAL = 5.0


class _Stamps(BaseStreamer):
    """Notes when each generated token came; the first `put` is the prompt."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.at_s.append(time.monotonic())

    def end(self) -> None:
        return


def main() -> None:
    """Measures both arms, prints and writes the ratio."""
    options = _arguments()
    load = Load(32, 32, options.input_len, options.output_len, vocab_size=40000, seed=options.seed)
    theirs = _transformers(load, options.cache_dir)
    ours = _kvrelay(load)
    rows: list[dict[str, Any]] = [
        {"arm": "transformers generate", "sequences": 1, "decode_tokens/s": theirs},
        {"arm": "kvrelay", "sequences": 32, "decode_tokens/s": ours},
        {"arm": f"ratio (goal {GOAL})", "sequences": "", "decode_tokens/s": ours / theirs},
    ]
    show(f"Decode, bfloat16, {os.cpu_count()} cores, {load.input_len} tokens in", rows)
    write_json(options.json, rows, {"seed": load.seed, "input_len": load.input_len, "output_len": load.output_len})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=96, help="generated tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvrelay", help="where the model is")
    parser.add_argument("--json", type=Path, default=Path("out/versus_transformers.json"), help="where the figures go")
    return parser.parse_args()


def _transformers(load: Load, cache_dir: Path) -> float:
    """Tokens a second after the first, the median over a few prompts."""
    path = resolve(MODEL, cache_dir).path
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # else each matmul unpacks, and casts to float32
    )
    rates = []
    for prompt in load.prompts()[:3]:
        stamps = _Stamps()
        ids = torch.tensor([prompt])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=load.output_len,
            min_new_tokens=load.output_len,
            do_sample=False,
            streamer=stamps,
        )
        rates.append((load.output_len - 1) / (stamps.at_s[-1] - stamps.at_s[1]))
    return sorted(rates)[len(rates) // 2]


def _kvrelay(load: Load) -> float:
    """Tokens a second of all sequences together, while all of them decode."""
    with running(model=MODEL, prefill=0, decode=0, both=1, threads=os.cpu_count(), dtype="bfloat16") as url:
        asyncio.run(run(url, MODEL, Load(2, 2, 16, 4, vocab_size=40000, seed=load.seed + 1)))
        return decode_rate(asyncio.run(run(url, MODEL, load)))


if __name__ == "__main__":
    main()
