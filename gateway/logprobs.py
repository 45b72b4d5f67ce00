"""Logprobs as clients get them: in the form of legacy completions and in that of chats (OpenAI's, as vLLM has them)."""

from collections.abc import Sequence
from typing import Any

from kvrelay.gateway.generation import Piece
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.types import TokenLogprobs


class LogprobsShape:
    """How the logprobs of one answer look. Every token that counts has its own, those that are no text too."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, as_token_ids: bool) -> None:
        """With `as_token_ids` tokens are called `token_id:5` instead of by their text, which several may share."""
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self._chat = chat

    def of(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """The logprobs of some tokens of an answer; None if there are none."""
        told = [(piece, piece.logprobs) for piece in pieces if piece.logprobs is not None]
        if not told:
            return None
        return {"content": [self._entry(*each) for each in told], "refusal": None} if self._chat else self._lists(told)

    def _lists(self, told: list[tuple[Piece, TokenLogprobs]]) -> dict[str, Any]:
        return {
            "text_offset": [piece.offset for piece, _ in told],
            "token_logprobs": [logprobs.logprob for _, logprobs in told],
            "tokens": [self._name(piece.token_id) for piece, _ in told],
            "top_logprobs": [self._by_name(*each) for each in told],
        }

    def _by_name(self, piece: Piece, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the one that was generated; of those with the same name, the likeliest."""
        by_name: dict[str, float] = {}
        for token_id, logprob in (*logprobs.top, (piece.token_id, logprobs.logprob)):
            by_name.setdefault(self._name(token_id), logprob)
        return by_name

    def _entry(self, piece: Piece, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [self._described(*each) for each in logprobs.top]
        return {**self._described(piece.token_id, logprobs.logprob), "top_logprobs": top}

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        name, raw = self._name(token_id), self._tokenizer.token_bytes(token_id)
        return {"token": name, "logprob": logprob, "bytes": list(raw)}

    def _name(self, token_id: int) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # a part of a character, written as OpenAI does
            escaped = "".join(f"\\x{byte:02x}" for byte in raw)
            return escaped if self._chat else f"bytes:{escaped}"
