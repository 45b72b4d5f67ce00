"""What `kvrelay verify` asks: a seeded matrix of requests, in waves of different sizes. No I/O."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

_WAVES = (1, 2, 1, 4, 1, 9, 1, 17, 1, 33)  # requests at a time: alone, and beside 1 to 32 others
# Around the sizes of blocks and chunks, where what is computed together changes.
_LENGTHS = (1, 3, 7, 9, 15, 17, 31, 33, 63, 65, 127, 129, 255, 257, 511, 513)
_MAX_TOKENS = (1, 2, 5, 16, 33, 64, 96)
_LOGPROBS = (0, 1, 5, 20)
_GREEDY = {"temperature": 0.0}
_SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 1.0, "top_k": 100, "top_p": 0.95, "min_p": 0.02},
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how to continue it. However often and wherever it is asked, its answer is one."""

    number: int
    prompt: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def body(self) -> dict[str, Any]:
        """The body of a request to `/v1/completions`."""
        named = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return {"prompt": list(self.prompt), **dict(self.options), **named}


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be asked: token ids below `vocab_size`, `max_model_len` tokens of prompt and answer together."""

    vocab_size: int
    max_model_len: int


Wave = tuple[Question, ...]


def make_plan(seed: int, num_requests: int, concurrency: int, limits: Limits) -> tuple[Wave, ...]:
    """Waves of `num_requests` requests together, `concurrency` at a time at most; the same for the same arguments.

    About a third are questions that were asked before, whose prompt is cached by now, whole; others grow an earlier
    prompt, or ask it with other options.

    Raises:
        ValueError: there is no room for a prompt and an answer.
    """
    if limits.max_model_len < 2:
        raise ValueError(f"{limits.max_model_len} tokens have no room for a prompt and an answer; allow at least 2.")
    maker = _Maker(random.Random(seed), limits)
    return tuple(tuple(maker.next() for _ in range(size)) for size in _sizes(num_requests, concurrency))


def _sizes(num_requests: int, concurrency: int) -> Iterator[int]:
    for size in cycle(_WAVES):
        if num_requests < 1:
            return
        yield min(size, concurrency, num_requests)
        num_requests -= min(size, concurrency, num_requests)


class _Maker:
    """Makes one question after the other, some of them out of earlier ones."""

    def __init__(self, draw: random.Random, limits: Limits) -> None:
        self._draw = draw
        self._limits = limits
        self._asked: list[Question] = []

    def next(self) -> Question:
        chance = self._draw.random()
        if not self._asked or chance < 0.4:
            return self._new(self._tokens(self._draw.choice(_LENGTHS)))
        earlier = self._draw.choice(self._asked)
        if chance < 0.75:
            return earlier
        grown = self._tokens(self._draw.choice(_LENGTHS)) if chance < 0.9 else ()
        return self._new(earlier.prompt + grown)

    def _new(self, prompt: tuple[int, ...]) -> Question:
        max_tokens = min(self._draw.choice(_MAX_TOKENS), self._limits.max_model_len - 1)
        options = {
            "max_tokens": max_tokens,
            "ignore_eos": self._draw.random() < 0.75,
            "logprobs": self._draw.choice(_LOGPROBS),
            "seed": self._draw.getrandbits(63),
            **(_GREEDY if self._draw.random() < 0.5 else self._draw.choice(_SAMPLED)),
        }
        fitting = prompt[: self._limits.max_model_len - max_tokens]
        question = Question(len(self._asked), fitting, tuple(options.items()))
        self._asked.append(question)
        return question

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(self._limits.vocab_size) for _ in range(count))
