"""What is told of long prompts beside short chats."""

import asyncio
from typing import Any

import pytest

from kvrelay.bench.interference import LONG, MAX_LONG, interfere
from kvrelay.bench.load import Load, Timing


class Server:
    """Ends the first so many long prompts at once and the others never; the chats, when no more come."""

    def __init__(self, num_finished: int) -> None:
        self._num_finished = num_finished
        self._num_long = 0
        self._full = asyncio.Event()

    async def send(self, load: Load) -> list[Timing]:
        if load.input_len != LONG.input_len:
            await self._full.wait()
            return [Timing(0.0, (0.1, 0.2, 0.4), (1, 2, 3))]
        self._num_long += 1
        if self._num_long == self._num_finished + MAX_LONG:
            self._full.set()
        if self._num_long > self._num_finished:
            await asyncio.Event().wait()
        return [Timing(1.0, (4.0,), (1,))]


def measured(num_finished: int) -> dict[str, Any]:
    async def measure() -> dict[str, Any]:
        return await interfere(Server(num_finished).send, seed=0, every_s=0.0)

    return asyncio.run(measure())


def test_long_prompts_that_are_cut_off_are_counted() -> None:
    figures = measured(num_finished=3)
    assert (figures["long_finished"], figures["long_cut_off"]) == (3, MAX_LONG)
    assert figures["long_ttft_p50_ms"] == pytest.approx(3000)


def test_without_one_that_finished_there_is_no_ttft_of_long_prompts() -> None:
    figures = measured(num_finished=0)
    assert (figures["long_ttft_p50_ms"], figures["long_finished"], figures["long_cut_off"]) == ("", 0, MAX_LONG)


def test_the_other_figures_are_those_of_the_chats() -> None:
    figures = measured(num_finished=1)
    assert {name: figures[name] for name in ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms")} == pytest.approx(
        {"tokens_per_s": 7.5, "ttft_p50_ms": 100, "ttft_p99_ms": 100}
    )
    assert figures["itl_p99_ms"] == pytest.approx(199)
