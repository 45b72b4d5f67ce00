"""What long prompts do to short chats: tokens/s, ITL and TTFT of the chats while a long prompt comes every 2 s."""

import asyncio
import itertools
from contextlib import suppress
from dataclasses import replace

from kvrelay.bench.load import Load, Timing, percentile, run, summary

SHORT = Load(num_requests=40, concurrency=8, input_len=64, output_len=128, vocab_size=40000)
LONG = Load(num_requests=1, concurrency=1, input_len=3000, output_len=8, vocab_size=40000)
EVERY_S = 2.0
MAX_LONG = 4  # at a time, so that a system that falls behind is not buried


async def interfere(url: str, model: str, seed: int) -> dict[str, float]:
    """Figures of the short chats, and the long prompts' median TTFT, in tokens/s and milliseconds.

    Raises:
        RuntimeError: a request failed.
    """
    timings: list[Timing] = []
    stream = asyncio.create_task(_long_prompts(url, model, seed, timings))
    await asyncio.sleep(EVERY_S)  # the first long prompt is under way
    figures = summary(await run(url, model, replace(SHORT, seed=seed)))
    stream.cancel()
    with suppress(asyncio.CancelledError):
        await stream
    long_ms = 1000 * percentile([timing.ttft_s for timing in timings], 50) if timings else float("nan")
    return {**figures, "long_ttft_p50_ms": long_ms}


async def _long_prompts(url: str, model: str, seed: int, timings: list[Timing]) -> None:
    """Until it is cancelled; whoever is under way then is cut off."""
    gate = asyncio.Semaphore(MAX_LONG)
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(1):
            await gate.acquire()
            group.create_task(_one_long(url, model, replace(LONG, seed=seed + number), timings, gate))
            await asyncio.sleep(EVERY_S)


async def _one_long(url: str, model: str, load: Load, timings: list[Timing], gate: asyncio.Semaphore) -> None:
    try:
        timings += await run(url, model, load)
    finally:
        gate.release()
