"""Reads the header of a GGUF file (version 2 or 3, little endian): metadata on access, tensors by name.

The format is specified in the ggml project's docs/gguf.md. Values are decoded only when they are looked up: the
vocabulary of a model is some hundred thousand strings, and most readers want a handful of numbers.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in numpy order (rows first), `ggml_type` ggml's number of its quantisation."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class _Value:
    """A metadata value not decoded yet: `count` is None for a scalar."""

    offset: int
    type: int
    count: int | None


class _Header:
    """A cursor over the mapped file. Every read is checked against its end, since damaged files lie about lengths."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.end, self.position = path, data, len(data), 0

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is a damaged or truncated GGUF file: {what}; get the file again.")

    def take(self, num_bytes: int) -> int:
        """Moves past `num_bytes` and gives where they began."""
        start = self.position
        if num_bytes > self.end - start:
            raise self.damaged(f"it ends at byte {self.end}, but {num_bytes} bytes are announced at byte {start}")
        self.position = start + num_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.take(8))[0])

    def string(self) -> str:
        length = self.u64()
        start = self.take(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"the text at byte {start} is not UTF-8") from error

    def skip(self, kind: int, count: int) -> None:
        if kind == _STRING:
            self._skip_strings(count)
        elif kind in _SCALARS:
            self.take(struct.calcsize("<" + _SCALARS[kind]) * count)
        else:
            raise self.damaged(f"unknown type {kind} of a metadata value before byte {self.position}")

    def _skip_strings(self, count: int) -> None:
        # Spelled out, because it walks over every token of the vocabulary each time the file is opened.
        data, position, last, unpack = self.data, self.position, self.end - 8, _U64.unpack_from
        for _ in range(count):
            if position > last:
                raise self.damaged(f"a list of {count} strings runs over its end at byte {self.end}")
            position += 8 + unpack(data, position)[0]
        self.position = position
        self.take(0)


class Metadata(Mapping[str, Any]):
    """The metadata of a GGUF file, e.g. `metadata["tokenizer.ggml.tokens"]`: bool, int, float, str or a list of one.

    Each look-up decodes anew; keep what you need. A damaged value raises ModelError when it is looked up.
    """

    def __init__(self, header: _Header, values: dict[str, _Value]) -> None:
        self._header = header
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        cursor = _Header(self._header.path, self._header.data)
        cursor.position = value.offset
        items = _decode(cursor, value.type, 1 if value.count is None else value.count)
        return items[0] if value.count is None else items

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open GGUF file. `data` is the mapped file, which tensors' bytes are cut from."""

    path: Path
    data: mmap.mmap
    metadata: Metadata
    tensors: dict[str, TensorInfo]


def open_gguf(path: Path) -> GGUFFile:
    """Maps a GGUF file and reads its header. Raises ModelError if it is not one, or damaged, or cannot be read."""
    header = _Header(path, _map(path))
    num_tensors, num_values = _preamble(header)
    values = dict(_read_value(header) for _ in range(num_values))
    metadata = Metadata(header, values)
    infos = [_read_tensor_info(header) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise header.damaged(f"its general.alignment is {alignment!r}")
    start = -(-header.position // alignment) * alignment
    tensors = {info.name: TensorInfo(info.name, info.shape, info.ggml_type, start + info.offset) for info in infos}
    return GGUFFile(path, header.data, metadata, tensors)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # mmap's word for an empty file
        raise ModelError(f"{path} is empty, but a GGUF file was expected; get the file again.") from error
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror}; give a GGUF file that this user may read."
        ) from error


def _preamble(header: _Header) -> tuple[int, int]:
    start = header.take(4)
    magic = header.data[start : start + 4].decode("latin-1")
    if magic != "GGUF":
        raise ModelError(
            f"{header.path} is not a GGUF file: it begins with {magic!r} instead of 'GGUF'; "
            "give a .gguf file or a folder in Hugging Face format."
        )
    version = header.u32()
    if version not in (2, 3):
        raise ModelError(
            f"{header.path} is GGUF version {version}, but little-endian versions 2 and 3 are supported; "
            "convert it anew with a current llama.cpp."
        )
    return header.u64(), header.u64()


def _read_value(header: _Header) -> tuple[str, _Value]:
    key = header.string()
    kind, count = header.u32(), None
    if kind == _ARRAY:
        kind, count = header.u32(), header.u64()
    offset = header.position
    header.skip(kind, 1 if count is None else count)
    return key, _Value(offset, kind, count)


def _decode(cursor: _Header, kind: int, count: int) -> list[Any]:
    if kind == _STRING:
        return [cursor.string() for _ in range(count)]
    form = struct.Struct(f"<{count}{_SCALARS[kind]}")
    return list(form.unpack_from(cursor.data, cursor.take(form.size)))


def _read_tensor_info(header: _Header) -> TensorInfo:
    name, num_dimensions = header.string(), header.u32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise header.damaged(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(header.u64() for _ in range(num_dimensions))[::-1]  # ggml lists the fastest dimension first
    return TensorInfo(name, shape, header.u32(), header.u64())
