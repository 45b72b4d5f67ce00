"""Token ids to text while they are generated: only what can no longer change is given out."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.gateway.vocabulary import TokenBytes

_CONTEXT = 6  # tokens before the new ones that are decoded with them, since they decide about spaces
_MAX_PENDING = 16  # tokens waiting for the rest of a character; none needs more, so what is longer is no character


class Detokenizer:
    """The text of one sample, piece by piece. Costs O(1) per token.

    For tokenizers whose tokens are bytes the pieces together equal `tokenizer.decode` of all ids, invalid bytes
    included. `prompt_token_ids` is what the sample continues: it decides whether a leading space belongs to the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        table = tokenizer.bytes_of_tokens
        self._decoder: _Decoder = (
            _WindowDecoder(tokenizer, prompt_token_ids[-_CONTEXT:])
            if table is None
            else _ByteDecoder(table, at_start=not prompt_token_ids)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and gives the text that is certain by now. Special tokens have none."""
        known = (token_id for token_id in token_ids if 0 <= token_id < self._tokenizer.vocab_size)
        return self._decoder.push([token_id for token_id in known if not self._tokenizer.is_special(token_id)])

    def flush(self) -> str:
        """Gives what was held back, when no more tokens come. An unfinished character becomes U+FFFD."""
        return self._decoder.flush()


class _Decoder(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteDecoder:
    """Joins the bytes of tokens and cuts them into characters."""

    def __init__(self, table: TokenBytes, *, at_start: bool) -> None:
        self._table = table.table
        self._strips = table.strips_start and at_start
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._stripped(self._utf8.decode(b"".join(self._table[token_id] for token_id in token_ids)))

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return self._stripped(text)

    def _stripped(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class _WindowDecoder:
    """Decodes the last few tokens with and without the new ones; the difference is the new text.

    The method of Hugging Face's text-generation-inference: tokens further back are settled, those before `_read`
    have been given out and serve as context.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._read = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, token_ids))

    def flush(self) -> str:
        return self._take(self._new_text())

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._new_text()
        unfinished = not text or text.endswith("\ufffd")
        return "" if unfinished and len(self._ids) - self._read < _MAX_PENDING else self._take(text)

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._read])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def _take(self, text: str) -> str:
        self._ids = self._ids[-_CONTEXT:]
        self._read = len(self._ids)
        return text
