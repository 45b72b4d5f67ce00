"""From a checkpoint to a ModelRunner: device, type, weights, and the size of the KV cache."""

import dataclasses
from pathlib import Path

import torch

from kvrelay.checkpoint import Checkpoint
from kvrelay.errors import MemoryShortage, StartError
from kvrelay.kernels.launch import HAS_TRITON, IS_INTERPRETED
from kvrelay.kernels.native_library import NativeLibrary, load_native
from kvrelay.kernels.sampling import SamplingKernel
from kvrelay.model.config import ModelConfig
from kvrelay.model.forward import Network
from kvrelay.model.graphed_network import Capture, CudaCapture, GraphedNetwork
from kvrelay.model.kv_cache import DTYPES, KVCache
from kvrelay.model.kv_memory import asked_kv_memory, default_kv_memory, num_kv_blocks
from kvrelay.model.native_network import build_native
from kvrelay.model.native_sampler import NativeSampler
from kvrelay.model.network import build_network
from kvrelay.model.packed_weights import Quantization, read_packed_weights
from kvrelay.model.runner import ModelRunner
from kvrelay.model.sampler import Sampler
from kvrelay.model.triton_network import TritonNetwork, build_triton
from kvrelay.model.triton_sampler import TritonSampler
from kvrelay.model.triton_weights import read_grouped_weights
from kvrelay.model.warm_up import warm_up
from kvrelay.model.weights import read_config, read_weights

_FAST_BFLOAT16 = {"amx_bf16", "avx512_bf16"}


def load(
    checkpoint: Checkpoint,
    *,
    cache_dir: Path,
    native_dir: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    quantization: Quantization = Quantization.NONE,
    kernels: str = "auto",
    block_size: int = 16,
    kv_memory_bytes: int | None = None,
    workers_on_machine: int = 1,
    max_model_len: int | None = None,
    max_decode_rows: int = 0,
) -> ModelRunner:
    """Loads a model and allocates its KV cache (tokens per block: `block_size`).

    `kernels` is `auto` (Triton's on a GPU, the native ones on a CPU that can have them), `triton` or `torch`; native
    ones are compiled into `native_dir`, or else the cache folder. `kv_cache_dtype` is `auto`, the model's own, or
    `int8`.

    `kv_memory_bytes` None takes a fair share of what is free among `workers_on_machine`; `max_model_len` None takes
    the model's own limit. On a GPU, decode steps of up to `max_decode_rows` sequences are recorded, and first steps
    computed, so that nobody waits while kernels are compiled. Raises ModelError, MemoryShortage or StartError in a
    sentence that says what to do.
    """
    target = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, target)
    has_triton = takes_triton(kernels, target)
    config = _limited(read_config(checkpoint), max_model_len)
    layout = config.kv_layout(block_size, resolve_kv_dtype(kv_cache_dtype, torch_dtype, target, has_triton=has_triton))
    if kv_memory_bytes is None:
        num_bytes = default_kv_memory(layout, config.max_model_len, workers_on_machine, target)
    else:
        num_bytes = asked_kv_memory(kv_memory_bytes, workers_on_machine, target)
    num_blocks = num_kv_blocks(layout, config.max_model_len, num_bytes)
    has_native = kernels == "auto" and target.type == "cpu" and torch_dtype is not torch.float16
    native = load_native(native_dir or cache_dir) if has_native else None
    network = _network(checkpoint, config, quantization, torch_dtype, target, cache_dir, native, has_triton)
    kv_cache = KVCache(layout, num_blocks, target)
    if target.type == "cuda":
        return prepared(network, kv_cache, _sampler(native, has_triton), max_decode_rows, CudaCapture())
    return ModelRunner(network, kv_cache, _sampler(native, has_triton))


def prepared(
    network: Network, kv_cache: KVCache, sampler: Sampler, max_decode_rows: int, capture: Capture
) -> ModelRunner:
    """A runner whose decode steps are recorded, if it is Triton's, and whose kernels are compiled.

    Raises MemoryShortage if the device has no room for it.
    """
    try:
        if max_decode_rows and isinstance(network, TritonNetwork):
            network = GraphedNetwork(network, kv_cache, max_decode_rows, capture)
        runner = ModelRunner(network, kv_cache, sampler)
        warm_up(runner)
    except torch.OutOfMemoryError as error:
        raise MemoryShortage(
            "The GPU has no room for what a step computes beside weights and KV; lower --kv-memory or --max-num-seqs."
        ) from error
    return runner


def _sampler(native: NativeLibrary | None, has_triton: bool) -> Sampler:
    if has_triton:
        return TritonSampler()
    return Sampler() if native is None else NativeSampler(SamplingKernel(native, torch.get_num_threads()))


def _network(
    checkpoint: Checkpoint,
    config: ModelConfig,
    quantization: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    cache_dir: Path,
    native: NativeLibrary | None,
    has_triton: bool,
) -> Network:
    if native is not None:
        model = read_packed_weights(checkpoint, config, quantization, dtype, cache_dir)
        return build_native(config, model, native, torch.get_num_threads())
    if quantization is Quantization.INT4 or (quantization is Quantization.INT8 and not has_triton):
        others = "auto, none or int8" if has_triton else "auto or none"
        raise StartError(
            f"Weights in {quantization} need the native CPU kernels, which this worker does not use (see the log, "
            f"--device, --dtype and --kernels); set --quantization to {others}."
        )
    if has_triton and quantization is not Quantization.NONE:
        return build_triton(config, read_grouped_weights(checkpoint, config, quantization, device), dtype, device)
    build = build_triton if has_triton else build_network
    return build(config, read_weights(checkpoint, config, dtype, cache_dir), dtype, device)


def resolve_device(name: str) -> torch.device:
    """`auto` (a GPU if there is one), `cpu` or `cuda`. Raises StartError for anything else, or a GPU not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise StartError(f"The device {name!r} is not known; set --device to auto, cpu or cuda.")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise StartError("The device cuda was asked for, but torch sees no GPU; set --device to auto or cpu.")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def takes_triton(kernels: str, device: torch.device) -> bool:
    """Whether a worker with these --kernels computes with Triton's. Raises StartError if it should and cannot."""
    if device.type == "cuda" and not HAS_TRITON:
        raise StartError("Triton is not installed, and a GPU is not used without; install triton, or set --device cpu.")
    if kernels == "triton" and device.type != "cuda" and not IS_INTERPRETED:
        raise StartError(
            f"Triton's kernels were asked for, but they compute on GPUs and the device is {device.type}; set --device "
            "to cuda or --kernels to auto. To try them slowly on a CPU, set TRITON_INTERPRET=1 and --dtype to float32."
        )
    return kernels == "triton" or (kernels == "auto" and device.type == "cuda")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, else float32. Raises StartError for unknown names."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_flags() & _FAST_BFLOAT16 else torch.float32
    if name not in DTYPES:
        raise StartError(f"The dtype {name!r} is not known; set --dtype to auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device, *, has_triton: bool) -> str:
    """As in a KVLayout. Raises StartError for what a device, or Triton's kernels, cannot compute with."""
    if name not in ("auto", "int8"):
        raise StartError(f"The KV cache dtype {name!r} is not known; set --kv-cache-dtype to auto or int8.")
    if name == "int8" and (has_triton or device.type != "cpu"):
        raise StartError(
            "A KV cache in int8 is for CPUs so far, not for GPUs or Triton's kernels; set --kv-cache-dtype to auto, or "
            "--device to cpu and --kernels to auto."
        )
    return str(dtype).removeprefix("torch.") if name == "auto" else name


def _cpu_flags() -> set[str]:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


def _limited(config: ModelConfig, max_model_len: int | None) -> ModelConfig:
    if max_model_len is None:
        return config
    if not 1 <= max_model_len <= config.max_model_len:
        raise StartError(
            f"A context of {max_model_len} tokens was asked for, but this model takes 1 to {config.max_model_len}; "
            "change --max-model-len."
        )
    return dataclasses.replace(config, max_model_len=max_model_len)
