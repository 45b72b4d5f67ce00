"""What long prompts do to short chats: tokens/s, ITL and TTFT of the chats while a long prompt comes every 2 s.

The measurement ends with the chats, and long prompts that are under way then are cut off. They are counted, since a
system that lets them lie does better by its chats.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.bench.load import Load, Timing, percentile, summary

Send = Callable[[Load], Awaitable[list[Timing]]]

SHORT = Load(num_requests=40, concurrency=8, input_len=64, output_len=128, vocab_size=40000)
LONG = Load(num_requests=1, concurrency=1, input_len=3000, output_len=8, vocab_size=40000)
EVERY_S = 2.0
MAX_LONG = 4  # at a time, so that a system that falls behind is not buried


@dataclass(slots=True)
class LongPrompts:
    """What became of the long prompts."""

    finished: list[Timing] = field(default_factory=list)
    num_cut_off: int = 0

    @property
    def figures(self) -> dict[str, Any]:
        """The median TTFT of those that finished, in milliseconds, if any did, and how many did and did not."""
        ttft_s = [timing.ttft_s for timing in self.finished]
        return {
            "long_ttft_p50_ms": 1000 * percentile(ttft_s, 50) if ttft_s else "",
            "long_finished": len(self.finished),
            "long_cut_off": self.num_cut_off,
        }


async def interfere(send: Send, seed: int, every_s: float = EVERY_S) -> dict[str, Any]:
    """Figures of the short chats, in tokens/s and milliseconds, and of the long prompts.

    `send` sends a load and returns a timing for each of its requests; a long prompt comes every `every_s` seconds.

    Raises:
        ExceptionGroup: a long prompt failed.
    """
    long = LongPrompts()
    stream = asyncio.create_task(_long_prompts(send, seed, every_s, long))
    await asyncio.sleep(every_s)  # the first long prompt is under way
    figures = summary(await send(replace(SHORT, seed=seed)))
    stream.cancel()
    with suppress(asyncio.CancelledError):
        await stream
    return {**figures, **long.figures}


async def _long_prompts(send: Send, seed: int, every_s: float, long: LongPrompts) -> None:
    """Until it is cancelled; whoever is under way then is cut off."""
    gate = asyncio.Semaphore(MAX_LONG)
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(1):
            await gate.acquire()
            group.create_task(_one_long(send, replace(LONG, seed=seed + number), long, gate))
            await asyncio.sleep(every_s)


async def _one_long(send: Send, load: Load, long: LongPrompts, gate: asyncio.Semaphore) -> None:
    try:
        long.finished += await send(load)
    except asyncio.CancelledError:
        long.num_cut_off += 1
        raise
    finally:
        gate.release()
