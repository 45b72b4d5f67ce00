"""Reads the tensors of a model folder: one safetensors file, or several with an index."""

from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.checkpoint import read_json
from kvrelay.errors import InternalError, ModelError
from kvrelay.model.tensors import Shape

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FolderReader:
    """A TensorReader over safetensors files. Tensors that are read stay mapped to the file, not copied.

    Raises ModelError if a file is missing or damaged, or a tensor is not float32, float16 or bfloat16.
    """

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        self._shards = {file: open_safetensors(path / file) for file in _shard_files(path)}
        self._file_of = {name: file for file, shard in self._shards.items() for name in shard.keys()}  # noqa: SIM118
        self.names = self._file_of.keys()

    def shape(self, name: str) -> Shape:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise ModelError(
                f"{self.source}/{self._file_of[name]} stores {name} as {stored}, but supported are "
                f"{', '.join(_DTYPES)}; take unquantised weights, or a .gguf file."
            )
        return _DTYPES[stored]

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._shards[self._file_of[name]].get_tensor(name)
        return tensor

    def form(self, name: str) -> None:
        """Nothing here is quantised."""

    def grouped(self, name: str) -> NoReturn:
        raise InternalError(f"{name} was asked for in groups, but {self.source} has floating-point weights.")

    def _slice(self, name: str) -> Any:
        return self._shards[self._file_of[name]].get_slice(name)


def open_safetensors(path: Path) -> Any:
    """Opens a safetensors file and checks its header. Raises ModelError if it is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{path} is a damaged or truncated safetensors file ({error}); get the file again.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}); give a complete model folder.") from error


def _shard_files(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return sorted(file.name for file in path.glob("*.safetensors"))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map that names the files of the tensors; get the file again.")
    return sorted({Path(str(file)).name for file in weight_map.values()})
