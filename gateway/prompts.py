"""From a request's body to the token ids of its prompt."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvrelay.errors import InvalidRequest
from kvrelay.gateway.chat_template import ChatTemplate
from kvrelay.gateway.openai_api import ChatBody, CompletionBody, RequestBody
from kvrelay.gateway.router import check_prompt_fits
from kvrelay.gateway.tokenizer import Tokenizer

LONG_CHARACTERS = 4096  # from here on a text is encoded in a thread, so that heartbeats and streams go on

T = TypeVar("T")


class PromptEncoder:
    """Encodes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Shares both; neither is changed."""
        self.tokenizer = tokenizer
        self._template = template

    async def encode(self, body: RequestBody, max_model_len: int) -> tuple[int, ...]:
        """The token ids of a prompt. One that cannot fit into `max_model_len` tokens is refused before it is encoded.

        Raises:
            InvalidRequest: ids beyond the vocabulary, messages that the template refuses, or a prompt of no tokens.
            ContextLengthExceeded: the prompt leaves no room for a token.
        """
        token_ids = await self._encode(body, max_model_len)
        if not token_ids:
            raise InvalidRequest(
                "The prompt has no tokens; there must be something to continue.", param=body.prompt_field
            )
        check_prompt_fits(len(token_ids), max_model_len, param=body.prompt_field)
        return tuple(token_ids)

    async def _encode(self, body: RequestBody, max_model_len: int) -> list[int]:
        match body:
            case ChatBody(messages=messages):
                text = "\n".join(message.text for message in messages)
                self._refuse_hopeless(text, max_model_len, "messages")
                return await _aside(len(text), lambda: self._encode_chat(body))
            case CompletionBody(prompt=str(text)):
                self._refuse_hopeless(text, max_model_len, "prompt")
                return await _aside(len(text), lambda: self.tokenizer.encode(text, add_bos=True))
            case CompletionBody(prompt=list(token_ids)):
                return self._checked(token_ids)
        raise TypeError(f"{type(body).__name__} is no body that holds a prompt.")

    def _encode_chat(self, body: ChatBody) -> list[int]:
        segments = self._template.render([message.for_template() for message in body.messages])
        return self.tokenizer.encode_segments(segments)

    def _refuse_hopeless(self, text: str, max_model_len: int, param: str) -> None:
        check_prompt_fits(self.tokenizer.min_tokens(text), max_model_len, param=param, at_least=True)

    def _checked(self, token_ids: list[int]) -> list[int]:
        if (largest := max(token_ids)) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"prompt holds the token id {largest}, but the vocabulary ends at {self.tokenizer.vocab_size - 1}.",
                param="prompt",
            )
        return token_ids


async def _aside(num_characters: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if num_characters > LONG_CHARACTERS else work()
