"""llama.cpp on one stream, for bench/versus_llama_cpp.py. Run by a Python that has llama-cpp-python; knows no KVRelay.

    python llama_cpp_stream.py '{"model": "PATH.gguf", "threads": 1, "prompts": [[1, 2, 3]], "output_len": 64}'

prints one JSON line: for each prompt the seconds to the first token and from there to the last. Tokens are chosen
greedily, and the cache is emptied before each prompt.
"""

import json
import sys
import time
from typing import Any

from llama_cpp import Llama


def main() -> None:
    """Generates as told."""
    job = json.loads(sys.argv[1])
    longest = max(map(len, job["prompts"])) + job["output_len"]
    model = Llama(job["model"], n_ctx=longest, n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False)
    _timed(model, job["prompts"][0][:16], 4)  # what is used first is loaded now
    seconds = [_timed(model, prompt, job["output_len"]) for prompt in job["prompts"]]
    sys.stdout.write(json.dumps(seconds) + "\n")


def _timed(model: Any, prompt: list[int], output_len: int) -> tuple[float, float]:
    model.reset()
    begin = time.monotonic()
    stamps = []
    for _ in model.generate(prompt, temp=0.0, reset=False):
        stamps.append(time.monotonic())
        if len(stamps) == output_len:
            break
    return stamps[0] - begin, stamps[-1] - stamps[0]


if __name__ == "__main__":
    main()
