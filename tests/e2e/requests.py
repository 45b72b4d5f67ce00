"""Requests that tests send over HTTP, many at a time."""

import asyncio
import random
from typing import Any

import httpx


def prompts(count: int, *, seed: int, vocab_size: int, longest: int = 400) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(draw.randint(1, longest))] for _ in range(count)]


async def complete(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> list[int]:
    """Token ids of one completion."""
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    token_ids: list[int] = choice["token_ids"]
    return token_ids


def complete_all(url: str, requests: list[dict[str, Any]]) -> list[list[int]]:
    """Token ids of completions that are all sent at the same time."""

    async def send() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(complete(client, **request) for request in requests))

    return asyncio.run(send())
