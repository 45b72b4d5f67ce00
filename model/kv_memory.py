"""How many KV blocks a worker gets, and how workers on one machine share its memory fairly."""

from pathlib import Path

import torch

from kvrelay.errors import MemoryShortage
from kvrelay.types import KVLayout

_USABLE_FRACTION = 0.5  # of what is available at start; weights, activations and other processes need the rest
_ENOUGH_SEQUENCES = 16  # of full context: more than that would lie idle, and in time every block is used once
_CGROUP = Path("/sys/fs/cgroup")


def num_kv_blocks(layout: KVLayout, max_model_len: int, kv_memory_bytes: int) -> int:
    """Blocks that fit into `kv_memory_bytes` over all layers.

    Raises MemoryShortage, naming both sizes, if one sequence of `max_model_len` tokens does not fit.
    """
    bytes_per_block = layout.block_bytes * layout.num_layers
    num_blocks, needed = kv_memory_bytes // bytes_per_block, layout.num_blocks(max_model_len)
    if num_blocks < needed:
        raise MemoryShortage(
            f"The KV memory of {_mib(kv_memory_bytes)} MiB cannot hold one sequence of {max_model_len} tokens, which "
            f"needs {_mib(needed * bytes_per_block)} MiB; raise --kv-memory, lower --max-model-len, or run fewer "
            "workers on this machine."
        )
    return num_blocks


def asked_kv_memory(asked_bytes: int, workers_on_machine: int, device: torch.device) -> int:
    """The bytes that were asked for, if every worker can have them.

    Raises MemoryShortage, naming both sizes, if the device has less free than its workers would take together.
    """
    free = available_memory(device)
    if asked_bytes * workers_on_machine > free:
        raise MemoryShortage(
            f"A KV memory of {_mib(asked_bytes)} MiB for each of {workers_on_machine} workers is more than the "
            f"{_mib(free)} MiB that are free here; lower --kv-memory or run fewer workers on this machine."
        )
    return asked_bytes


def default_kv_memory(layout: KVLayout, max_model_len: int, workers_on_machine: int, device: torch.device) -> int:
    """Bytes: an equal share of half of the free memory, but no more than 16 sequences of full context use.

    Raises ValueError if `workers_on_machine` is less than one.
    """
    if workers_on_machine < 1:
        raise ValueError(f"{workers_on_machine} workers on this machine were named; expected at least one")
    share = int(available_memory(device) * _USABLE_FRACTION) // workers_on_machine
    return min(share, _ENOUGH_SEQUENCES * layout.num_blocks(max_model_len) * layout.block_bytes * layout.num_layers)


def available_memory(device: torch.device) -> int:
    """Free bytes of a device; for the CPU of this machine within this container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_memory(), _container_memory())


def _machine_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise MemoryShortage("/proc/meminfo does not tell the available memory; name the size with --kv-memory.")


def _container_memory() -> int:
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    # Nothing to read or the word "max": no limit, so that the machine's own memory decides.
    return _machine_memory() if limit is None or used is None else max(limit - used + _idle_page_cache(), 0)


def _cgroup_bytes(name: str) -> int | None:
    file = _CGROUP / name
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _idle_page_cache() -> int:
    """Bytes that the container's use includes, but that the kernel gives back when they are needed."""
    file = _CGROUP / "memory.stat"
    lines = file.read_text().splitlines() if file.is_file() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
