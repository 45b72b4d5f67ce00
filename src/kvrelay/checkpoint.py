"""Finds the model that `--model` names, and fingerprints it. Free of torch, since the gateway reads models too."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvrelay.cache import file_digest
from kvrelay.errors import ModelError
from kvrelay.fetch import SMOLLM2, fetch
from kvrelay.gguf_file import open_gguf

_BUNDLED = {SMOLLM2.name: SMOLLM2}
_CONTENT = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


class CheckpointFormat(StrEnum):
    """How a model is stored."""

    GGUF = "gguf"
    HF = "hf"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. `fingerprint` is the same for the same content, wherever it lies and whatever it is called."""

    name: str  # served model name
    path: Path  # a .gguf file or a folder in Hugging Face format
    format: CheckpointFormat
    fingerprint: str  # hex SHA-256 over config, weights and tokenizer


def resolve(model: str, cache_dir: Path) -> Checkpoint:
    """Finds a model: a folder in Hugging Face format, a GGUF file, or the name of the bundled one (fetched once).

    Raises ModelError if it is missing, damaged or of no known format, StartError if `cache_dir` cannot be written.
    """
    path = Path(model).expanduser()
    if model in _BUNDLED and not path.exists():
        path = fetch(_BUNDLED[model], cache_dir)
        return _gguf(model, path, cache_dir)
    if path.is_dir():
        return _folder(path.resolve(), cache_dir)
    if path.is_file():
        return _gguf(path.stem, path.resolve(), cache_dir)
    raise ModelError(
        f"The model {model!r} was not found: expected a folder in Hugging Face format, a .gguf file, "
        f"or the name {' or '.join(_BUNDLED)}; check --model."
    )


def metadata(path: Path) -> Mapping[str, Any]:
    """The metadata of a GGUF file, decoded on access. Raises ModelError if the file is not GGUF or damaged."""
    return open_gguf(path).metadata


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object of a model folder. Raises ModelError if it is missing, unreadable or not an object."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; give a complete model folder.") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); get the file again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__} instead of a JSON object; get the file again.")
    return content


def _gguf(name: str, path: Path, cache_dir: Path) -> Checkpoint:
    open_gguf(path)  # refuses what is not GGUF before gigabytes are hashed
    return Checkpoint(name, path, CheckpointFormat.GGUF, file_digest(path, cache_dir))


def _folder(path: Path, cache_dir: Path) -> Checkpoint:
    read_json(path / "config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelError(
            f"{path} has a config.json but no *.safetensors weights; "
            "give a folder in Hugging Face format with safetensors, or a .gguf file."
        )
    return Checkpoint(path.name, path, CheckpointFormat.HF, _folder_fingerprint(path, cache_dir))


def _folder_fingerprint(path: Path, cache_dir: Path) -> str:
    files = sorted({file for pattern in _CONTENT for file in path.glob(pattern) if file.is_file()})
    lines = [f"{file.name}\0{file_digest(file, cache_dir)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
