"""The JSON that clients get: OpenAI's objects, whole or as events of a stream, and its error object."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.errors import RequestError
from kvrelay.gateway.generation import Piece
from kvrelay.gateway.logprobs import LogprobsShape
from kvrelay.types import FinishReason

DONE = b"data: [DONE]\n\n"


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def usage(num_prompt_tokens: int, num_generated_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Exact numbers of tokens. Cached ones are those of the prompt that were found in a cache and not computed."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated_tokens,
        "total_tokens": num_prompt_tokens + num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


def to_json(content: object) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """How the answers to one request look. `with_ids` adds the token ids, as vLLM's `return_token_ids` does.

    `logprobs` says how these look, if they are asked for.
    """

    chat: bool
    request_id: str
    model: str
    fingerprint: str
    prompt_token_ids: tuple[int, ...]
    with_ids: bool
    with_usage: bool
    logprobs: LogprobsShape | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Piece], reason: FinishReason | None, num_cached_tokens: int) -> dict[str, Any]:
        """The answer in one object."""
        text = "".join(piece.text for piece in pieces)
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        choice = self._choice(content, pieces, reason, first=True)
        kind = "chat.completion" if self.chat else "text_completion"
        counted = usage(len(self.prompt_token_ids), len(pieces), num_cached_tokens)
        return {**self._head(kind), "choices": [choice], "usage": counted}

    def chunk(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """The event of one token."""
        delta: dict[str, str] = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
        content = {"delta": delta} if self.chat else {"text": piece.text}
        return self._event([self._choice(content, [piece], piece.finish_reason, first=first)])

    def last(self, num_generated_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
        """The event after the last token, if usage was asked for."""
        return {**self._event([]), "usage": usage(len(self.prompt_token_ids), num_generated_tokens, num_cached_tokens)}

    def shows(self, piece: Piece, *, first: bool) -> bool:
        """False for a token that would be an empty event: half of a character, or of a stop string."""
        return bool(piece.text or piece.finish_reason or first or self.with_ids or self.logprobs)

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return {**head, "choices": choices, **({"usage": None} if self.with_usage else {})}

    def _choice(
        self, content: dict[str, Any], pieces: Sequence[Piece], reason: FinishReason | None, *, first: bool
    ) -> dict[str, Any]:
        logprobs = self.logprobs.of(pieces) if self.logprobs else None
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
        if self.with_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
            choice["prompt_token_ids"] = list(self.prompt_token_ids) if first else None
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
