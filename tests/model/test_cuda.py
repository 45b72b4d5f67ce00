"""A model and its KV on a real GPU.

Bits are each token's own. KV leaves when it is computed and lands before it is read, and a model goes on from it
elsewhere.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.checkpoint import resolve
from kvrelay.errors import WireError
from kvrelay.model.graphed_network import GraphedNetwork
from kvrelay.model.kv_cache import KVCache
from kvrelay.model.load import load
from kvrelay.model.runner import ModelRunner
from kvrelay.model.triton_sampler import TritonSampler
from kvrelay.types import Batch, ScheduledSequence, Sequence
from tests.model.conftest import Driver, random_ids
from tests.model.sameness import alone, same, together
from tests.model.test_kv_cache import layout
from tests.model.test_native_sameness import NUM_TOKENS
from tests.tiny_model import VOCAB, write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
CUDA = torch.device("cuda")


def filled(num_blocks: int, seed: int, dtype: str = "bfloat16") -> KVCache:
    cache = KVCache(layout(dtype), num_blocks, CUDA)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    torch.cuda.synchronize()
    return cache


def keep_busy() -> None:
    """The network's stream is busy for a tenth of a second: whatever does not wait for it overtakes it."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("block_ids", [[4], [0, 1, 2], [5, 0, 3], []])
def test_blocks_come_back_as_they_left(dtype: str, block_ids: list[int]) -> None:
    source, target = filled(6, 1, dtype), filled(8, 2, dtype)
    expected = target.tensor.clone()
    moved_to = [7 - block_id for block_id in block_ids]
    expected[1, moved_to] = source.tensor[1, block_ids]
    payload = source.read(1, block_ids)
    assert bytes(payload) == source.tensor[1, block_ids].cpu().view(torch.uint8).numpy().tobytes()
    target.write(1, moved_to, payload)
    assert torch.equal(target.tensor, expected)


def test_more_than_the_buffers_hold_goes_through_them_in_turn() -> None:
    cache = KVCache(layout("float32", heads=8, block_size=16, head_dim=128), 200, CUDA)
    payload = bytes(range(256)) * (200 * cache.layout.block_bytes // 256)
    cache.write(1, range(200), payload)
    assert cache.read(1, range(200)) == payload
    assert not cache.tensor[0].any()


def test_a_payload_of_another_size_is_refused() -> None:
    cache = filled(4, 3)
    with pytest.raises(WireError, match="were expected"):
        cache.write(0, [1, 2], bytes(2 * cache.layout.block_bytes + 1))


def test_what_leaves_waits_for_its_layer() -> None:
    cache = filled(4, 1)
    keep_busy()
    cache.tensor[0].fill_(2.0)
    cache.computed(0)
    assert torch.frombuffer(bytearray(cache.read(0, [3, 1])), dtype=torch.bfloat16).eq(2.0).all()


def test_what_enters_waits_for_earlier_steps_and_later_ones_wait_for_it() -> None:
    cache = filled(4, 1)
    before, payload = cache.tensor.clone(), bytes(2 * cache.layout.block_bytes)
    keep_busy()
    seen_before = cache.tensor.clone()
    cache.write(0, [3, 1], payload)
    seen_after = cache.tensor.clone()
    assert torch.equal(seen_before, before)
    assert not seen_after[0, [3, 1]].any()


def test_blocks_move_on_the_device_alone_and_memory_may_be_freed_at_once() -> None:
    source, target = filled(6, 1), filled(6, 2)
    assert source.staged is not None
    assert target.staged is not None
    packed, digest = source.staged.gather(range(1, 2), [5, 0])
    assert target.staged.digest(packed) == digest
    keep_busy()  # so that the scatter is still to come when the memory is freed
    target.staged.scatter(range(1, 2), [2, 4], packed)
    num_bytes = len(packed)
    del packed
    torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device=CUDA)
    assert torch.equal(target.tensor[1, [2, 4]], source.tensor[1, [5, 0]])


def test_kv_that_left_layer_by_layer_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    checkpoint = resolve(str(write_tiny_model(tmp_path / "model")), tmp_path / "cache")
    options = {"cache_dir": tmp_path / "cache", "block_size": 4, "kv_memory_bytes": 4 << 20, "max_model_len": 256}
    here, there = (Driver(load(checkpoint, device="cuda", **options)) for _ in range(2))  # type: ignore[arg-type]
    sequence = here.sequence(random_ids(21, VOCAB, 4))
    moved = there.sequence(list(sequence.token_ids))
    there.runner.kv_cache.tensor.fill_(float("nan"))
    token = send(here.runner, there.runner.kv_cache, sequence, moved.block_table)
    for each in (sequence, moved):
        each.num_computed_tokens = 21
        each.token_ids.append(token)
    assert there.generate([moved], 20) == here.generate([sequence], 20)


@pytest.fixture(params=["bfloat16", "float32"])
def drivers_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Driver]:
    """Makes drivers of the tiny model in one precision."""
    checkpoint = resolve(str(write_tiny_model(tmp_path / "model")), tmp_path / "cache")

    def make(**options: Any) -> Driver:
        given = {"dtype": request.param, "kv_memory_bytes": 32 << 20, "device": "cuda"} | options
        return Driver(load(checkpoint, cache_dir=tmp_path / "cache", **given))

    return make


def test_logits_are_close_to_those_of_torch(drivers_of: Callable[..., Driver]) -> None:
    ours, plain = drivers_of(max_decode_rows=4), drivers_of(kernels="torch", device="cpu", dtype="float32")
    prompts = [random_ids(length, VOCAB, length) for length in (600, 1, 33)]
    found = []
    for driver in (ours, plain):
        rows = [driver.sequence(prompt) for prompt in prompts]
        logits = [driver.prefill(row, 300) for row in rows]
        for row in rows:
            row.token_ids[-1] = 7  # whatever was sampled
        driver.step(*((row, 1) for row in rows))
        found.append(torch.stack([*logits, *driver.logits]).cpu())
    tolerance = 1e-3 if ours.runner.network.weights == "fp32" else 0.05
    spread = float(found[1].max() - found[1].min())
    assert (found[0] - found[1]).abs().max() < tolerance * spread


def test_logits_have_the_same_bits_recorded_or_not_in_every_batch_chunk_and_block_size(
    drivers_of: Callable[..., Driver],
) -> None:
    prompts = [random_ids(length, VOCAB, length) for length in (1, 15, 64, 511, 700)]
    eager, graphed, others = drivers_of(), drivers_of(max_decode_rows=4), drivers_of(block_size=8, max_decode_rows=8)
    assert isinstance(graphed.runner.network, GraphedNetwork)
    expected = [alone(eager, prompt, NUM_TOKENS) for prompt in prompts]
    for driver, chunk in ((eager, 64), (graphed, 1000), (graphed, 7), (others, 100)):
        assert all(map(same, (alone(driver, prompt, NUM_TOKENS, chunk) for prompt in prompts), expected))
    for driver in (eager, graphed, others):
        assert all(map(same, together(driver, prompts, NUM_TOKENS), expected))


def test_tokens_are_those_of_the_sampler_on_the_host(drivers_of: Callable[..., Driver]) -> None:
    driver = drivers_of(max_decode_rows=4)
    plain, found = driver.runner, []
    for runner in (plain, ModelRunner(plain.network, plain.kv_cache, TritonSampler())):
        rows = [driver.sequence(random_ids(9, VOCAB, seed), temperature=1.2, seed=seed) for seed in range(3)]
        driver.runner = runner
        driver.step(*((row, 9) for row in rows))
        found.append(driver.generate(rows, 30))
    assert found[0] == found[1]


def test_a_step_is_queued_while_the_device_computes_what_was_queued_before(drivers_of: Callable[..., Driver]) -> None:
    driver = drivers_of(max_decode_rows=4)
    row = driver.sequence(random_ids(9, VOCAB, 1))
    driver.prefill(row, 9)
    for item in ((row, 1), (driver.sequence(random_ids(40, VOCAB, 2)), 40)):  # recorded, and not
        batch = Batch((ScheduledSequence(*item),))
        queue_step(driver.runner, batch)  # takes memory and loads what later ones find
        torch.cuda.synchronize()
        for _ in range(20):
            keep_busy()
        queue_step(driver.runner, batch)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()


def queue_step(runner: ModelRunner, batch: Batch) -> None:
    """All that a step computes but its tokens."""
    with torch.inference_mode():
        forward = runner.network.begin(batch, runner.kv_cache)
        for layer in range(runner.config.num_layers):
            forward.compute(layer)
        forward.logits()


def send(runner: ModelRunner, target: KVCache, sequence: Sequence, block_ids: list[int]) -> int:
    """Computes a prompt, each layer leaving when it is yielded; gives the token that follows."""
    steps = runner.run(Batch((ScheduledSequence(sequence, sequence.num_prompt_tokens),)))
    while True:
        try:
            layer = next(steps)
        except StopIteration as end:
            return int(end.value[0].token_id)
        target.write(layer, block_ids[:6], runner.kv_cache.read(layer, sequence.block_table[:6]))
