"""From a worker's settings to the model it serves."""

import logging

from kvrelay.checkpoint import resolve
from kvrelay.config import WorkerSettings
from kvrelay.model.load import load
from kvrelay.model.packed_weights import Quantization
from kvrelay.model.runner import ModelRunner
from kvrelay.process import ServedModel
from kvrelay.types import Role

log = logging.getLogger(__name__)


def load_served(settings: WorkerSettings) -> tuple[ModelRunner, ServedModel]:
    """Loads the model and says what others must know about it.

    Raises:
        StartError: the model or the machine does not allow it, in one sentence.
    """
    checkpoint = resolve(settings.model, settings.cache_dir)
    runner = load(
        checkpoint,
        cache_dir=settings.cache_dir,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        quantization=Quantization(settings.quantization),
        kernels=settings.kernels,
        native_dir=settings.native_dir,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory,
        workers_on_machine=settings.workers_on_machine,
        max_model_len=settings.max_model_len,
        max_decode_rows=0 if settings.role is Role.PREFILL else settings.max_num_seqs,
    )
    layout, num_blocks = runner.kv_cache.layout, runner.kv_cache.num_blocks
    log.info(
        "KV memory: %.1f GiB, %d blocks of %d tokens in %s.",
        num_blocks * layout.block_bytes * layout.num_layers / 2**30,
        num_blocks,
        layout.block_size,
        layout.dtype,
    )
    served = ServedModel(
        name=checkpoint.name,
        fingerprint=checkpoint.fingerprint,
        max_model_len=runner.config.max_model_len,
        vocab_size=runner.config.vocab_size,
        layout=layout,
        weights=runner.network.weights,
        device=str(runner.network.device),
    )
    return runner, served
