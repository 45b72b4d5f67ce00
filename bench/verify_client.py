"""Sends the waves of `kvrelay verify` to a gateway and reads the answers."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from kvrelay.bench.verify_compare import Answer, AnswerToken
from kvrelay.bench.verify_plan import Question, Wave
from kvrelay.client import connect, get_json, is_local, refusal

TIMEOUT_S = 600.0


def ask(url: str, waves: tuple[Wave, ...], take: Callable[[Question, Answer], None]) -> None:
    """Sends all requests of a wave at once, and waits for its answers before the next one; `take` gets each answer.

    Answers come in the order of their questions. A request that fails has an answer too, which says why.
    """
    asyncio.run(_ask(url, waves, take))


async def _ask(url: str, waves: tuple[Wave, ...], take: Callable[[Question, Answer], None]) -> None:
    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(TIMEOUT_S, connect=5.0)
    trust_env = not is_local(url)
    async with httpx.AsyncClient(
        base_url=url.rstrip("/"), timeout=timeout, limits=limits, trust_env=trust_env
    ) as client:
        for wave in waves:
            answers = await asyncio.gather(*(_answer(client, question) for question in wave))
            for question, answer in zip(wave, answers, strict=True):
                take(question, answer)


async def _answer(client: httpx.AsyncClient, question: Question) -> Answer:
    try:
        response = await client.post("/v1/completions", json=question.body)
    except httpx.HTTPError as error:
        return Answer(error=str(error) or type(error).__name__)
    if response.status_code != httpx.codes.OK:
        return Answer(error=refusal(response.status_code, response.content))
    try:
        return parse_answer(response.json())
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return Answer(error=f"The answer is not what a completion with logprobs looks like ({error!r}).")


def parse_answer(content: dict[str, Any]) -> Answer:
    """Reads a completion with logprobs and token ids.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it is something else.
    """
    choice = content["choices"][0]
    told = choice["logprobs"]
    logprobs = [float(logprob) for logprob in told["token_logprobs"]]
    tops = [tuple((name, float(logprob)) for name, logprob in top.items()) for top in told["top_logprobs"]]
    tokens = tuple(map(AnswerToken, *_alike(choice["token_ids"], logprobs, tops)))
    return Answer(tokens, choice["finish_reason"], content["usage"]["prompt_tokens_details"]["cached_tokens"])


def _alike(*lists: list[Any]) -> tuple[list[Any], ...]:
    if len({len(each) for each in lists}) > 1:
        raise ValueError(f"{' and '.join(str(len(each)) for each in lists)} token ids, logprobs and top_logprobs")
    return lists


def snapshot_of(url: str) -> dict[str, Any]:
    """What a gateway says of its cluster. Raises GatewayError if none answers there."""
    with connect(url) as client:
        return get_json(client, "/cluster")
