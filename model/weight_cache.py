"""Weights converted once per machine: a safetensors file in the cache folder that all workers map.

A tensor at a time is read, converted and written, so that building needs little memory beyond the largest tensor.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from kvrelay.cache import file_digest, locked, write_atomically
from kvrelay.errors import ModelError, StartError
from kvrelay.model.loader_hf import open_safetensors
from kvrelay.model.tensors import Shape

_FORMAT_VERSION = 1  # raise it whenever packing or conversion changes
_ALIGNMENT = 64  # bytes, a cache line, for vector loads from the mapped file
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the cache file, and how to make it. `make` may give any type that `dtype` can hold."""

    name: str
    shape: Shape
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


def cached_weights(fingerprint: str, specs: list[TensorSpec], cache_dir: Path) -> dict[str, torch.Tensor]:
    """Maps the converted weights of a model, building the file if it is missing or damaged; processes wait in line.

    Raises ModelError if the checkpoint turns out damaged, StartError if the file cannot be written (a full disk).
    """
    path = cache_dir / "weights" / f"{_key(fingerprint, specs)}.safetensors"
    with locked(path.with_suffix(".lock")):
        if not _is_intact(path, cache_dir):
            _build(path, specs)
        if (weights := _mapped(path, specs)) is None:
            raise StartError(
                f"{path} cannot be read although it was just written; check that disk, or delete the file."
            )
    return weights


def _key(fingerprint: str, specs: list[TensorSpec]) -> str:
    layout = [[spec.name, list(spec.shape), _SAFETENSORS_NAMES[spec.dtype]] for spec in specs]
    return hashlib.sha256(json.dumps([_FORMAT_VERSION, fingerprint, layout]).encode()).hexdigest()[:32]


def _is_intact(path: Path, cache_dir: Path) -> bool:
    digest = path.with_suffix(".sha256")
    if not (path.is_file() and digest.is_file()):
        return False
    return file_digest(path, cache_dir) == digest.read_text(errors="replace")


def _mapped(path: Path, specs: list[TensorSpec]) -> dict[str, torch.Tensor] | None:
    try:
        file = open_safetensors(path)
    except ModelError:
        return None
    return {spec.name: file.get_tensor(spec.name) for spec in specs}


def _build(path: Path, specs: list[TensorSpec]) -> None:
    for stale in path.parent.glob(f"{path.stem}.*.tmp"):  # of a builder that was killed; the lock is ours now
        stale.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    try:
        digest = _write(temporary, specs)
        write_atomically(path.with_suffix(".sha256"), digest.encode())
        temporary.replace(path)
    except OSError as error:
        raise StartError(
            f"The converted weights cannot be written to {path}: {error.strerror}; about "
            f"{sum(_num_bytes(spec) for spec in specs) / 2**20:.0f} MiB are needed there, make room or name another "
            "folder with --cache-dir."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, specs: list[TensorSpec]) -> str:
    """Writes a safetensors file (format of the safetensors README) and gives the SHA-256 of its content."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _pieces(specs):
            digest.update(piece)
            file.write(piece)
        _to_disk(file)
    return digest.hexdigest()


def _pieces(specs: list[TensorSpec]) -> Iterator[bytes | memoryview]:
    header = _header(specs)
    yield len(header).to_bytes(8, "little")
    yield header
    for spec in specs:
        tensor = spec.make().to(spec.dtype).contiguous()
        yield tensor.reshape(-1).view(torch.uint8).numpy().data
        yield bytes(-_num_bytes(spec) % _ALIGNMENT)


def _header(specs: list[TensorSpec]) -> bytes:
    entries: dict[str, object] = {}
    padding: list[tuple[int, int]] = []
    position = 0
    for spec in specs:
        end = position + _num_bytes(spec)
        entries[spec.name] = {
            "dtype": _SAFETENSORS_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = -(-end // _ALIGNMENT) * _ALIGNMENT
        if position > end:
            padding.append((end, position))
    # safetensors allows no holes, so that the padding is named like tensors of bytes.
    entries |= {
        f"padding.{index}": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for index, (begin, end) in enumerate(padding)
    }
    text = json.dumps(entries).encode()
    return text + b" " * (-(8 + len(text)) % _ALIGNMENT)


def _num_bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _to_disk(file: BinaryIO) -> None:
    # Without this, a power cut after the rename could leave a file of the right size full of zeros.
    file.flush()
    os.fsync(file.fileno())
