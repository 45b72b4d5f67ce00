"""A storm of requests of random lengths, a share of which leave at random moments."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Outcome:
    """What became of the requests of one storm."""

    completed: int = 0
    cancelled: int = 0
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Storm:
    """`count` requests, `at_once` at a time, `cancel_share` of them cancelled after a random time."""

    count: int
    at_once: int
    cancel_share: float
    seed: int
    vocab_size: int
    longest_prompt: int = 300
    longest_output: int = 40
    patience_s: float = 2.0  # a request that is cancelled leaves within this time

    async def blow(self, url: str) -> Outcome:
        """Sends everything and returns when every request has ended."""
        outcome, gate = Outcome(), asyncio.Semaphore(self.at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._one(client, gate, outcome, index) for index in range(self.count)))
        return outcome

    async def _one(self, client: httpx.AsyncClient, gate: asyncio.Semaphore, outcome: Outcome, index: int) -> None:
        draw = random.Random(f"{self.seed}-{index}")
        body = {
            "prompt": [draw.randrange(self.vocab_size) for _ in range(draw.randint(1, self.longest_prompt))],
            "max_tokens": draw.randint(1, self.longest_output),
            "temperature": draw.choice((0.0, 1.0)),
            "seed": index,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": draw.random() < 0.7,
        }
        patience_s = draw.uniform(0.0, self.patience_s) if draw.random() < self.cancel_share else None
        async with gate:
            try:
                async with asyncio.timeout(patience_s):
                    await self._ask(client, body)
            except TimeoutError:
                outcome.cancelled += 1
            except (httpx.HTTPError, AssertionError) as error:
                outcome.failed.append(f"{type(error).__name__}: {error}")
            else:
                outcome.completed += 1

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        if not body["stream"]:
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            assert len(response.json()["choices"][0]["token_ids"]) == body["max_tokens"]
            return
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]", lines[-1]
