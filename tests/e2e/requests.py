"""Requests that tests send over HTTP, many at a time."""

import asyncio
import json
import random
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Ending:
    """How a request ended: with all its tokens, or with the code of an error after some of them."""

    token_ids: list[int]
    error: str


async def end(client: httpx.AsyncClient, prompt: list[int], *, max_tokens: int) -> Ending:
    """Streams one completion to whichever end it has."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    token_ids: list[int] = []
    async with client.stream(
        "POST", "/v1/completions", json={**body, "return_token_ids": True, "stream": True}
    ) as response:
        if response.status_code != 200:
            return Ending([], json.loads(await response.aread())["error"]["code"])
        events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    for event in events[:-1]:
        token_ids += json.loads(event)["choices"][0]["token_ids"]
    return Ending(token_ids, "" if events[-1] == "[DONE]" else json.loads(events[-1])["error"]["code"])


def end_all(url: str, prompts: list[list[int]], *, max_tokens: int, timeout_s: float) -> list[Ending]:
    """How streams end that are all begun at the same time. Raises httpx.TimeoutException for one that does not."""

    async def send() -> list[Ending]:
        async with httpx.AsyncClient(base_url=url, timeout=timeout_s) as client:
            return await asyncio.gather(*(end(client, prompt, max_tokens=max_tokens) for prompt in prompts))

    return asyncio.run(send())
