"""Builds the tokenizer of a GGUF file from its metadata. Token ids equal those of llama.cpp.

GGUF names the pre-tokenizer, the way in which text is cut before byte pairs are merged, but does not describe it. The
patterns here are those that llama.cpp (src/llama-vocab.cpp) uses for each name.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from kvrelay.errors import ModelError
from kvrelay.gateway.vocabulary import Vocabulary

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types of GGUF
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUPPORTED = ("default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "smollm", "starcoder", "refact")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = ("eos", "eot", "eom")  # end of text, of turn, of message


def gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Builds the tokenizer that the metadata of a GGUF file describes.

    Raises ModelError if it is missing, damaged, or of a kind that is not supported.
    """
    try:
        return _build(metadata)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions, and damaged metadata can break anything above it
        raise ModelError(
            f"The tokenizer in the GGUF file is damaged ({error!r}): expected tokens, token types and merges that fit "
            "together; get the file again."
        ) from error


def _build(metadata: Mapping[str, Any]) -> Vocabulary:
    _check_kind(metadata.get("tokenizer.ggml.model"))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    tokenizer = _tokenizer(metadata, tokens)
    named = {name: _named_id(metadata, key) for name, key in _NAMED.items()}
    _prepend_bos(tokenizer, metadata, tokens)
    return Vocabulary(
        tokenizer=tokenizer,
        named_tokens={name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
        eos_token_ids=frozenset(end for key in _ENDS if (end := _named_id(metadata, key)) is not None),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _check_kind(kind: str | None) -> None:
    if kind != "gpt2":
        raise ModelError(
            f"The GGUF file's tokenizer is of the kind {kind!r}, but only 'gpt2' (byte-level BPE) is read from GGUF; "
            "serve the same model from a folder in Hugging Face format with a tokenizer.json."
        )


def _tokenizer(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=_is_llama3(pre)))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, tokens, metadata["tokenizer.ggml.token_type"])
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # Spaces are never part of a token in the byte alphabet, so the first one separates.
    left, separator, right = merge.partition(" ")
    if not separator:
        raise ModelError(f"The GGUF file's merge {merge!r} is not a pair of tokens; get the file again.")
    return left, right


def _add_whole_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    pairs = list(zip(tokens, types, strict=True))
    special = [AddedToken(token, normalized=False) for token, kind in pairs if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == _USER_DEFINED])


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _patterns(pre)]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _patterns(pre: str) -> tuple[str, ...]:
    match pre:
        case "smollm" | "starcoder" | "refact":
            return r"\p{N}", _GPT2
        case "gpt-2":
            return (_GPT2,)
        case "default":
            return r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"
        case "llama-bpe" | "llama3" | "llama-v3":
            return (rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
        case "qwen2":
            return (rf"{_WORDS}|\p{{N}}|{_REST}",)
    raise ModelError(
        f"The GGUF file's pre-tokenizer {pre!r} is not supported, only {', '.join(_SUPPORTED)}; "
        "serve the same model from a folder in Hugging Face format with a tokenizer.json."
    )


def _prepend_bos(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    bos = _named_id(metadata, "bos")
    wanted = metadata.get("tokenizer.ggml.add_bos_token", _is_llama3(metadata.get("tokenizer.ggml.pre")))
    if wanted and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )


def _is_llama3(pre: str | None) -> bool:
    return pre in ("llama-bpe", "llama3", "llama-v3")


def _named_id(metadata: Mapping[str, Any], key: str) -> int | None:
    token_id: int | None = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return token_id
