"""Reads the tokenizer of a folder in Hugging Face format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kvrelay.checkpoint import read_json
from kvrelay.errors import ModelError
from kvrelay.gateway.vocabulary import Vocabulary

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def hf_vocabulary(folder: Path) -> Vocabulary:
    """Reads tokenizer.json and what the files beside it say about it.

    Raises ModelError if tokenizer.json is missing or any of the files is damaged.
    """
    tokenizer = _tokenizer(folder / "tokenizer.json")
    settings = _read_if_present(folder / "tokenizer_config.json")
    named = {name: text for name in _NAMED if (text := _token_text(settings.get(name)))}
    return Vocabulary(tokenizer, named, _eos_token_ids(folder, tokenizer, named), _chat_template(folder, settings))


def _tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(
            f"{path.parent} has no tokenizer.json; save the model's fast tokenizer into the folder "
            "(tokenizer.model alone is not read)."
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelError(f"{path} is not a valid tokenizer ({error}); get the file again.") from error
    # Both may be saved with a tokenizer, and either would falsify prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _eos_token_ids(folder: Path, tokenizer: tokenizers.Tokenizer, named: Mapping[str, str]) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        ids = _read_if_present(folder / name).get("eos_token_id")
        if ids is not None:
            return _checked_ids(folder / name, ids)
    eos = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return frozenset() if eos is None else frozenset({eos})


def _checked_ids(path: Path, ids: object) -> frozenset[int]:
    found = ids if isinstance(ids, list) else [ids]
    if not all(type(token_id) is int and token_id >= 0 for token_id in found):
        raise ModelError(f"{path} gives {ids!r} as eos_token_id; expected a token id or a list of them.")
    return frozenset(found)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name, as transformers writes them
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as UTF-8 text ({error}); get the file again.") from error
