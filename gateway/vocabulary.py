"""What a model's files say about text: its tokenizer, the tokens with a name, and the bytes of every token."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "\u2581"  # how SentencePiece writes a space


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as read from a model, before it is put to use.

    `named_tokens` maps bos_token, eos_token, unk_token and pad_token to their text, as far as the model has them.
    """

    tokenizer: tokenizers.Tokenizer
    named_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes that each token stands for, so that decoding is joining.

    `table[id]` is empty for ids without a token. With `strips_start` one space at the very start of a text is not part
    of it (SentencePiece puts it there).
    """

    table: tuple[bytes, ...]
    strips_start: bool


def token_bytes(tokenizer: tokenizers.Tokenizer) -> TokenBytes | None:
    """Reads the bytes of every token, or gives None where tokens have none of their own.

    Byte-level BPE and SentencePiece with byte fallback are of the first kind; in others (WordPiece, say) the text of a
    token depends on its neighbours.
    """
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    if decoder.get("type") == "ByteLevel":
        alphabet = byte_alphabet()
        return TokenBytes(tuple(_byte_level(token, alphabet) for token in _tokens(tokenizer)), strips_start=False)
    steps = decoder.get("decoders", [])
    if [step["type"] for step in steps[:3]] == ["Replace", "ByteFallback", "Fuse"] and _only_strips_start(steps[3:]):
        return TokenBytes(tuple(map(_sentencepiece, _tokens(tokenizer))), strips_start=len(steps) == 4)
    return None


def byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level BPE writes bytes (Radford et al., 2019: the GPT-2 encoder).

    Printable Latin-1 characters are themselves; the other bytes, in order, are U+0100 and following.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def _only_strips_start(steps: list[dict[str, object]]) -> bool:
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return steps in ([], [strip])


def _tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    return [tokens.get(token_id, "") for token_id in range(max(tokens, default=-1) + 1)]


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()  # a token added as plain text


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()
