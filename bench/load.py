"""Closed-loop load on an OpenAI endpoint: so many requests at a time, each token stamped as it arrives."""

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True)
class Timing:
    """When one request was sent and when each of its tokens came, in monotonic seconds."""

    sent_s: float
    token_s: tuple[float, ...]
    token_ids: tuple[int, ...]

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0] - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Load:
    """`num_requests` prompts of `input_len` random tokens, `output_len` tokens each, `concurrency` at a time."""

    num_requests: int
    concurrency: int
    input_len: int
    output_len: int
    vocab_size: int
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """The same for the same seed, and no two alike."""
        draw = random.Random(self.seed)
        return [[draw.randrange(self.vocab_size) for _ in range(self.input_len)] for _ in range(self.num_requests)]


async def run(url: str, model: str, load: Load) -> list[Timing]:
    """Sends the load and returns a timing for each request.

    Raises:
        RuntimeError: a request failed, or gave another number of tokens than asked for.
    """
    gate = asyncio.Semaphore(load.concurrency)
    limits = httpx.Limits(max_connections=load.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        return await asyncio.gather(*(_one(client, gate, model, prompt, load) for prompt in load.prompts()))


async def _one(client: httpx.AsyncClient, gate: asyncio.Semaphore, model: str, prompt: list[int], load: Load) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with gate:
        sent_s = time.monotonic()
        stamps: list[float] = []
        token_ids: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"The server answered {response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now_s = time.monotonic()
                    came = _token_ids(line)
                    stamps += [now_s] * len(came)
                    token_ids += came
    if len(stamps) != load.output_len:
        raise RuntimeError(f"{load.output_len} tokens were asked for and {len(stamps)} came.")
    return Timing(sent_s, tuple(stamps), tuple(token_ids))


def _token_ids(line: str) -> list[int]:
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise RuntimeError(f"The stream ended in an error: {event['error']['message']}")
    return [token_id for choice in event["choices"] for token_id in choice.get("token_ids") or ()]


def summary(timings: list[Timing]) -> dict[str, float]:
    """Output tokens a second over the whole run, and percentiles in milliseconds."""
    begin = min(timing.sent_s for timing in timings)
    end = max(timing.token_s[-1] for timing in timings)
    itl_s = [gap for timing in timings for gap in timing.itl_s]
    ttft_s = [timing.ttft_s for timing in timings]
    return {
        "tokens_per_s": sum(len(timing.token_s) for timing in timings) / (end - begin),
        "ttft_p50_ms": 1000 * percentile(ttft_s, 50),
        "ttft_p99_ms": 1000 * percentile(ttft_s, 99),
        "itl_p50_ms": 1000 * percentile(itl_s, 50),
        "itl_p99_ms": 1000 * percentile(itl_s, 99),
    }


def decode_rate(timings: list[Timing]) -> float:
    """Tokens a second while every request was decoding: prefill of any is excluded.

    Raises:
        RuntimeError: there was no such time.
    """
    begin = max(timing.token_s[0] for timing in timings)
    end = min(timing.token_s[-1] for timing in timings)
    if end <= begin:
        raise RuntimeError("No moment had all requests decoding; ask for more output tokens.")
    return sum(1 for timing in timings for at in timing.token_s if begin < at <= end) / (end - begin)


def percentile(values: list[float], percent: int) -> float:
    """Linear interpolation between the closest ranks; the value itself if there is one."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
