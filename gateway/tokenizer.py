"""Text to token ids and back, for the model that is served.

What a user types is always text: the characters of a special token, typed, are encoded as characters. Special ids
come only from segments that say so, which is what the chat template's own text is made of.
"""

from collections.abc import Iterable, Mapping, Sequence

import tokenizers
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import Metaspace

from kvrelay.checkpoint import Checkpoint, CheckpointFormat, metadata
from kvrelay.errors import InvalidRequest
from kvrelay.gateway.gguf_vocab import gguf_vocabulary
from kvrelay.gateway.hf_vocab import hf_vocabulary
from kvrelay.gateway.length_bound import length_bound
from kvrelay.gateway.segments import Segment, any_of, split
from kvrelay.gateway.vocabulary import TokenBytes, Vocabulary, token_bytes


class Tokenizer:
    """The tokenizer of one model. Immutable and safe to use from several threads; encoding releases the GIL."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._text = vocabulary.tokenizer
        self._text.encode_special_tokens = True  # special tokens in text are text
        self._inner = _without_first_space(self._text)
        added = self._text.get_added_tokens_decoder()
        self._special = {token.content: (token_id, token) for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(token_id for token_id, _ in self._special.values())
        self._special_pattern = any_of(self._special)
        self._bytes = token_bytes(self._text)
        self._bos_ids = _bos_ids(self._text)
        self._bound = length_bound(self._text, self._bytes)
        self.vocab_size = max(self._text.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.named_tokens: Mapping[str, str] = vocabulary.named_tokens
        self.eos_token_ids = vocabulary.eos_token_ids
        self.chat_template = vocabulary.chat_template

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> "Tokenizer":
        """Reads a model's tokenizer. Raises ModelError if it is missing, damaged or of a kind not supported."""
        if checkpoint.format is CheckpointFormat.GGUF:
            return cls(gguf_vocabulary(metadata(checkpoint.path)))
        return cls(hf_vocabulary(checkpoint.path))

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a text, if the model names one."""
        return self.named_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends a text, if the model names one."""
        return self.named_tokens.get("eos_token")

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Every special token's text and id."""
        return {text: token_id for text, (token_id, _) in self._special.items()}

    @property
    def bytes_of_tokens(self) -> TokenBytes | None:
        """The bytes that tokens stand for, or None for a tokenizer whose tokens have none of their own."""
        return self._bytes

    def is_special(self, token_id: int) -> bool:
        """True for tokens that are no text, such as the end of a turn."""
        return token_id in self._special_ids

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Encodes text. Special tokens in it are taken as text unless `allow_special`.

        `add_bos` puts the token that begins a text in front if this model wants one. Raises InvalidRequest for text
        that is not Unicode (half a surrogate pair).
        """
        segments = list(split(text, self._special_pattern)) if allow_special else [Segment(text)]
        return self.encode_segments(segments, add_bos=add_bos)

    def encode_segments(self, segments: Sequence[Segment], *, add_bos: bool = False) -> list[int]:
        """Encodes a rendered chat: special segments become special ids, all else is text.

        Raises InvalidRequest for text that is not Unicode, or for a special segment that names no special token.
        """
        ids = list(self._bos_ids) if add_bos else []
        for index, segment in enumerate(segments):
            if segment.special:
                ids.append(self._special_id(segment.text))
            else:
                encoder = self._inner if index else self._text
                ids += _encode(encoder, self._trimmed(segments, index))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Gives the text of token ids. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary are empty."""
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        if skip_special_tokens:
            known = [token_id for token_id in known if token_id not in self._special_ids]
        if self._bytes is None:
            return str(self._text.decode(known, skip_special_tokens=False))
        text = b"".join(self._bytes.table[token_id] for token_id in known).decode(errors="replace")
        return text.removeprefix(" ") if self._bytes.strips_start else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, as logprobs report them. They need not be whole characters."""
        if self._bytes is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        return self._bytes.table[token_id] if 0 <= token_id < self.vocab_size else b""

    def min_tokens(self, text: str) -> int:
        """A lower bound of how many tokens `text` has, without encoding it: a hopeless prompt is refused by it."""
        return self._bound.min_tokens(text)

    def _special_id(self, text: str) -> int:
        if text not in self._special:
            raise InvalidRequest(f"{text!r} is not a special token of this model; write it as text.")
        return self._special[text][0]

    def _trimmed(self, segments: Sequence[Segment], index: int) -> str:
        # Some special tokens swallow the white space beside them.
        before = self._added(segments[index - 1]) if index else None
        after = self._added(segments[index + 1]) if index + 1 < len(segments) else None
        text = segments[index].text
        text = text.lstrip() if before and before.rstrip else text
        return text.rstrip() if after and after.lstrip else text

    def _added(self, segment: Segment) -> AddedToken | None:
        return self._special[segment.text][1] if segment.text in self._special and segment.special else None


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text has {text[error.start]!a}, half of a surrogate pair, at character {error.start}; "
            "send whole Unicode characters."
        ) from error
    # `encode` holds the GIL throughout, `encode_batch_fast` releases it.
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _bos_ids(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    # What the tokenizer would append is left out: a prompt is there to be continued.
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    start = next((at for at in range(len(framed)) if framed[at : at + len(plain)] == plain), 0)
    return tuple(framed[:start])


def _without_first_space(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer for text behind a special token: some put a space before the first word of a prompt only."""
    if not isinstance(tokenizer.pre_tokenizer, Metaspace) or tokenizer.pre_tokenizer.prepend_scheme != "first":
        return tokenizer
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    inner.pre_tokenizer = Metaspace(tokenizer.pre_tokenizer.replacement, "never", tokenizer.pre_tokenizer.split)
    inner.encode_special_tokens = True
    return inner
