"""From a checkpoint to the weights of the network: mapped as they are if possible, else converted once and mapped."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from kvrelay.checkpoint import Checkpoint, CheckpointFormat
from kvrelay.gguf_file import open_gguf
from kvrelay.model.config import ModelConfig
from kvrelay.model.config_gguf import config_from_gguf
from kvrelay.model.config_hf import config_from_folder
from kvrelay.model.loader_gguf import GGUFTensors
from kvrelay.model.loader_hf import FolderReader
from kvrelay.model.tensors import Shape, TensorReader, check_tensors, expected_shapes, is_norm, packing
from kvrelay.model.weight_cache import TensorSpec, cached_weights

_log = logging.getLogger(__name__)

Weights = Mapping[str, torch.Tensor]


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a checkpoint of either format. Raises ModelError if it is damaged or not supported."""
    if checkpoint.format is CheckpointFormat.HF:
        return config_from_folder(checkpoint.path)
    return config_from_gguf(open_gguf(checkpoint.path))


def read_weights(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, cache_dir: Path) -> Weights:
    """Maps the weights in `dtype` into memory that all processes of the machine share.

    They are named as in `packing(config)`, or unpacked if the checkpoint can be mapped as it is. Raises ModelError
    if the checkpoint is damaged or does not fit `config`, StartError if the cache cannot be written.
    """
    reader = open_reader(checkpoint, config)
    shapes = expected_shapes(config)
    check_tensors(reader, shapes)
    stored = {reader.dtype(name) for name in shapes}
    if checkpoint.format is CheckpointFormat.HF and stored == {dtype}:
        return {name: reader.read(name) for name in shapes}
    parts_of = packing(config)
    with conversion_progress(checkpoint, len(parts_of), f"to {str(dtype).removeprefix('torch.')}") as advance:
        specs = [_spec(reader, shapes, name, parts, dtype, advance) for name, parts in parts_of.items()]
        return cached_weights(checkpoint.fingerprint, specs, cache_dir)


def open_reader(checkpoint: Checkpoint, config: ModelConfig) -> TensorReader:
    """The tensors of a checkpoint. Raises ModelError if it is damaged."""
    if checkpoint.format is CheckpointFormat.HF:
        return FolderReader(checkpoint.path)
    return GGUFTensors(open_gguf(checkpoint.path), config)


def _spec(
    reader: TensorReader,
    shapes: Mapping[str, Shape],
    name: str,
    parts: tuple[str, ...],
    dtype: torch.dtype,
    advance: Callable[[], None],
) -> TensorSpec:
    rows = sum(shapes[part][0] for part in parts)

    def make() -> torch.Tensor:
        advance()
        return torch.cat([reader.read(part) for part in parts])

    return TensorSpec(name, (rows, *shapes[parts[0]][1:]), torch.float32 if is_norm(name) else dtype, make)


@contextmanager
def conversion_progress(checkpoint: Checkpoint, num_tensors: int, purpose: str) -> Iterator[Callable[[], None]]:
    """Shows the conversion, if there is one, on a terminal; elsewhere one log line says that it began."""
    text = f"Converting {checkpoint.name} {purpose} (once per machine)"
    if not sys.stderr.isatty():
        yield _logged_once(text)
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=num_tensors, visible=False)
        yield lambda: progress.update(task, advance=1, visible=True)


def _logged_once(text: str) -> Callable[[], None]:
    pending = [text]

    def advance() -> None:
        if pending:
            _log.info("%s", pending.pop())

    return advance
