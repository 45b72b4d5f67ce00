"""How few tokens a text can have, told from its length alone, so that hopeless prompts need no encoding."""

import json
import math
from dataclasses import dataclass
from typing import Any

import tokenizers

from kvrelay.gateway.vocabulary import SPACE_MARK, TokenBytes, byte_alphabet


@dataclass(frozen=True, slots=True)
class LengthBound:
    """Every byte of a text that has a token at all ends up in one token of at most `longest` bytes.

    `shrink` is the factor by which normalising may shorten the text before (0: unknown, so that nothing follows from
    its length), `lost` the bytes for which the vocabulary has no token.
    """

    longest: int
    shrink: int
    lost: bytes

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`. Costs about a millisecond per megabyte."""
        if not self.shrink:
            return 0
        num_bytes = len(text.encode(errors="surrogatepass").translate(None, self.lost))
        return -(-num_bytes // (self.shrink * self.longest))


def length_bound(tokenizer: tokenizers.Tokenizer, tokens: TokenBytes | None) -> LengthBound:
    """Finds the bound of a tokenizer; one that may drop text, or merge any amount of it, has none."""
    longest = max(1, max(map(len, tokens.table), default=1)) if tokens else 1
    return LengthBound(longest, _max_shrink(tokenizer) if tokens else 0, _lost(tokenizer))


def _lost(tokenizer: tokenizers.Tokenizer) -> bytes:
    if getattr(tokenizer.model, "byte_fallback", False):
        return b""
    return bytes(byte for character, byte in byte_alphabet().items() if tokenizer.token_to_id(character) is None)


def _max_shrink(tokenizer: tokenizers.Tokenizer) -> int:
    added = tokenizer.get_added_tokens_decoder().values()
    cuts = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    byte_wise = getattr(tokenizer.model, "byte_fallback", False) or any(cut["type"] == "ByteLevel" for cut in cuts)
    if not byte_wise or any(token.lstrip or token.rstrip for token in added) or any(map(_drops_text, cuts)):
        return 0
    return math.prod(_shrink(step) for step in _steps(tokenizer.normalizer, "normalizers"))


def _steps(stage: Any, parts: str) -> list[dict[str, Any]]:
    state: dict[str, Any] = json.loads(stage.__getstate__()) if stage else {"type": "Sequence", parts: []}
    return list(state[parts]) if state["type"] == "Sequence" else [state]


def _drops_text(pre_tokenizer: dict[str, Any]) -> bool:
    kept = pre_tokenizer["type"] in ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
    return not kept or pre_tokenizer.get("behavior") == "Removed"


def _shrink(normalizer: dict[str, Any]) -> int:
    if normalizer["type"] == "NFC":
        return 3  # Hangul: three letters of three bytes become one syllable of three
    if normalizer["type"] == "Prepend" or (normalizer["type"], normalizer.get("content")) == ("Replace", SPACE_MARK):
        return 1
    return 0
