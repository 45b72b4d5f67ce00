"""One answer while it comes: tokens that wait for the client, and their text."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvrelay.errors import RequestError
from kvrelay.events import RequestTimeline
from kvrelay.gateway.detokenizer import Detokenizer
from kvrelay.gateway.stop import StopMatcher
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.messages import TokenOutput
from kvrelay.types import FinishReason, TokenLogprobs

MAX_TAKEN = 64  # so that what is written at once stays small, however far behind a client is


class Token(NamedTuple):
    """A generated token, and why the sample ends with it if it does."""

    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


class Generation:
    """The mailbox between the workers' tokens and one client.

    What waits here is bounded by the request's `max_tokens`, at a few dozen bytes each, and for each logprob about a
    hundred more; a client that does not read is cancelled.
    """

    def __init__(self, request_id: str, prompt_token_ids: tuple[int, ...], timeline: RequestTimeline) -> None:
        """Nothing has come yet."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.timeline = timeline
        self.cached_tokens = 0  # of the prompt; known with the first token
        self._tokens: deque[Token] = deque()
        self._ended = False
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    def put(self, outputs: Sequence[TokenOutput]) -> None:
        """Tokens came; the first of a sample says how much of the prompt was cached."""
        self.cached_tokens = max([self.cached_tokens, *(output.cached_tokens for output in outputs)])
        self._tokens.extend(Token(output.token_id, output.finish_reason, output.logprobs) for output in outputs)
        self._news.set()

    def end(self, error: RequestError | None) -> None:
        """No more will come."""
        self._ended, self._error = True, error
        self._news.set()

    async def take(self) -> list[Token]:
        """Waits for tokens, and returns those that are there, `MAX_TAKEN` at most; none when the answer is complete.

        Raises:
            RequestError: the request failed, after all tokens that came before were taken.
        """
        while not (self._tokens or self._ended):
            self._news.clear()
            await self._news.wait()
        if not self._tokens and self._error is not None:
            raise self._error
        return [self._tokens.popleft() for _ in range(min(len(self._tokens), MAX_TAKEN))]


class Piece(NamedTuple):
    """What one token adds to an answer. `text` may be empty, while a character or a stop string is incomplete.

    The token's own text begins at character `offset` of the answer: with a part of a character, where that begins.
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None
    offset: int = 0
    logprobs: TokenLogprobs | None = None


class AnswerText:
    """Turns the tokens of one sample into text, up to a stop string or the end."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str]) -> None:
        """The answer continues `prompt_token_ids`."""
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids)
        self._matcher = StopMatcher(stop)
        self.num_tokens = 0
        self._num_characters = 0  # that are complete, those held back for a stop string too
        self.finish_reason: FinishReason | None = None

    def push(self, token: Token) -> Piece:
        """Takes the next token. The one that makes the model stop is counted, but is no text.

        Raises:
            ValueError: the answer has ended.
        """
        if self.finish_reason is not None:
            raise ValueError("The answer has ended; no token can follow.")
        self.num_tokens += 1
        offset = self._num_characters
        text = "" if token.finish_reason is FinishReason.STOP else self._detokenizer.push([token.token_id])
        if token.finish_reason is not None:
            text += self._detokenizer.flush()
        self._num_characters += len(text)
        text, matched = self._matcher.push(text)
        self.finish_reason = FinishReason.STOP if matched else token.finish_reason
        if token.finish_reason is not None:
            text += self._matcher.flush()
        return Piece(text, token.token_id, self.finish_reason, offset, token.logprobs)
