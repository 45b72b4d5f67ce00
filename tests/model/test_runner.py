"""One step: batches of all kinds give what each sequence gives alone, and nothing leaks from blocks of others."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvrelay.checkpoint import resolve
from kvrelay.errors import InternalError, StartError
from kvrelay.model.load import load, resolve_device, resolve_dtype, resolve_kv_dtype
from kvrelay.model.logprobs import token_logprobs
from kvrelay.model.runner import ModelRunner
from kvrelay.model.step_plan import padded_positions
from kvrelay.types import Batch, ScheduledSequence
from tests.model.conftest import Driver, drain, random_ids
from tests.model.test_gguf import VOCAB, write_gguf
from tests.places import CACHE_DIR
from tests.tiny_model import write_tiny_model


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def runner(tmp_path: Path, kernels: str) -> ModelRunner:
    return small_runner(tmp_path, kernels=kernels)


def small_runner(
    tmp_path: Path, block_size: int = 4, dtype: str = "float32", kernels: str = "auto", kv_cache_dtype: str = "auto"
) -> ModelRunner:
    if not (tmp_path / "m.gguf").exists():
        write_gguf(tmp_path / "m.gguf")
    checkpoint = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    options = {
        "cache_dir": tmp_path / "cache",
        "device": "cpu",
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "native_dir": CACHE_DIR,
        "kernels": kernels,
    }
    return load(checkpoint, block_size=block_size, kv_memory_bytes=8 << 20, **options)  # type: ignore[arg-type]


def alone(runner: ModelRunner, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    results = []
    for prompt in prompts:
        driver = Driver(runner)
        sequence = driver.sequence(prompt)
        driver.prefill(sequence, 1000)
        results += driver.generate([sequence], num_tokens - 1)
    return results


def test_mixed_batches_give_what_each_sequence_gives_alone(runner: ModelRunner) -> None:
    prompts = [random_ids(length, VOCAB, length) for length in (1, 2, 3, 4, 5, 8, 13, 40, 130, 190)]
    expected = alone(runner, prompts, 12)
    driver = Driver(runner)
    sequences = [driver.sequence(prompt) for prompt in prompts]
    wanted = dict(zip(map(id, sequences), (2, 7, 1, 3, 5, 4, 6, 9, 31, 64), strict=True))
    while any(sequence.num_generated_tokens < 12 for sequence in sequences):
        unfinished = [sequence for sequence in sequences if sequence.num_generated_tokens < 12]
        driver.step(*((s, min(wanted[id(s)], s.num_uncomputed_tokens)) for s in unfinished))
    assert [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences] == expected


@pytest.mark.parametrize("block_size", [1, 3, 16, 33])
def test_block_size_changes_nothing(block_size: int, tmp_path: Path) -> None:
    prompts = [random_ids(37, VOCAB, 9)]
    assert alone(small_runner(tmp_path, block_size), prompts, 30) == alone(small_runner(tmp_path), prompts, 30)


def check_unharmed(clean: Driver, poisoned: Driver) -> None:
    """Both give the same after prompts in chunks and some tokens, though one's blocks were full of garbage."""
    prompts = [random_ids(length, VOCAB, length) for length in (1, 6, 9, 130)]
    for driver in (clean, poisoned):
        sequences = [driver.sequence(prompt) for prompt in prompts]
        for sequence in sequences:
            driver.prefill(sequence, 5)
        driver.generate(sequences, 20)
    assert poisoned.logits.isfinite().all()
    assert torch.equal(poisoned.logits, clean.logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_garbage_in_unwritten_blocks_never_reaches_a_result(dtype: str, tmp_path: Path) -> None:
    clean, poisoned = (Driver(small_runner(tmp_path, dtype=dtype)) for _ in range(2))
    poisoned.runner.kv_cache.tensor.fill_(float("nan"))
    check_unharmed(clean, poisoned)


def test_garbage_never_reaches_a_result_of_kv_in_int8(kernels: str, tmp_path: Path) -> None:
    """Every bit set: codes that are worth not a number."""
    clean, poisoned = (Driver(small_runner(tmp_path, kernels=kernels, kv_cache_dtype="int8")) for _ in range(2))
    poisoned.runner.kv_cache.tensor.fill_(-1)
    check_unharmed(clean, poisoned)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.01), ("float16", 0.01), ("bfloat16", 0.03)])
@pytest.mark.parametrize("chunk", [1, 30])
def test_kv_in_int8_gives_nearly_what_kv_in_float32_gives(
    chunk: int, dtype: str, most: float, kernels: str, tmp_path: Path
) -> None:
    exact = Driver(small_runner(tmp_path, dtype="float32", kernels=kernels))
    coded = Driver(small_runner(tmp_path, dtype=dtype, kernels=kernels, kv_cache_dtype="int8"))
    assert coded.runner.kv_cache.tensor.dtype == torch.int8
    expected, found = (each.prefill(each.sequence(random_ids(130, VOCAB, 1)), chunk) for each in (exact, coded))
    assert 0 < (found - expected).abs().max() < most * expected.std()


@pytest.mark.parametrize("chunk", [1, 30])
def test_kv_in_int8_lies_where_it_belongs(chunk: int, tmp_path: Path, load_folder: Callable[..., ModelRunner]) -> None:
    """With weights so large that it matters which token attends to which."""
    model = write_tiny_model(tmp_path / "model")
    exact, coded = (Driver(load_folder(model, kv_cache_dtype=name)) for name in ("auto", "int8"))
    expected, found = (each.prefill(each.sequence(random_ids(130, 256, 1)), chunk) for each in (exact, coded))
    assert (found - expected).abs().max() < expected.std()


def test_blocks_used_before_leave_no_trace(runner: ModelRunner) -> None:
    first, second = Driver(runner), Driver(runner)
    expected = first.prefill(first.sequence(random_ids(50, VOCAB, 1)), 9)
    runner.kv_cache.tensor.normal_(generator=torch.Generator().manual_seed(1))
    assert torch.equal(second.prefill(second.sequence(random_ids(50, VOCAB, 1)), 9), expected)


def test_only_the_scheduled_tokens_are_written(runner: ModelRunner) -> None:
    driver = Driver(runner)
    sequence = driver.sequence(random_ids(6, VOCAB, 1))
    runner.kv_cache.tensor.fill_(3.0)
    driver.step((sequence, 6))
    untouched = [block for block in range(runner.kv_cache.num_blocks) if block not in sequence.block_table[:2]]
    assert (runner.kv_cache.tensor[:, untouched] == 3.0).all()
    last = runner.kv_cache.tensor[:, sequence.block_table[1]]
    assert (last[:, :, :, :2] != 0).all()
    assert (last[:, :, :, 2:] == 0).all()  # the rest of a begun block


def test_kv_of_a_layer_is_complete_when_the_layer_is_yielded(smollm2_runner: ModelRunner) -> None:
    driver = Driver(smollm2_runner)
    sequence = driver.sequence(random_ids(16, 1000, 1))
    steps = smollm2_runner.run(Batch((ScheduledSequence(sequence, 16),)))
    seen = []
    for layer in steps:
        assert not torch.is_inference_mode_enabled()
        seen.append(bytes(smollm2_runner.kv_cache.read(layer, sequence.block_table[:1])))
    assert seen == [bytes(smollm2_runner.kv_cache.read(n, sequence.block_table[:1])) for n in range(30)]
    assert sequence.num_computed_tokens == 0
    assert len(sequence.token_ids) == 16


@pytest.mark.parametrize("staged", [False, True])
def test_a_device_is_given_the_next_layer_before_one_is_yielded(
    staged: bool, tmp_path: Path, load_folder: Callable[[Path], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, seen = load_folder(write_tiny_model(tmp_path / "model")), list[str]()
    if staged:
        monkeypatch.setattr(runner.kv_cache, "staged", object())
    monkeypatch.setattr(runner.kv_cache, "computed", lambda layer: seen.append(f"computed {layer}"))
    for layer in runner.run(Batch((ScheduledSequence(Driver(runner).sequence([1, 2, 3]), 3),))):
        seen.append(f"yielded {layer}")
    assert seen == (
        ["computed 0", "computed 1", "yielded 0", "computed 2", "yielded 1", "yielded 2"]
        if staged
        else ["computed 0", "yielded 0", "computed 1", "yielded 1", "computed 2", "yielded 2"]
    )


def test_kv_moved_to_another_cache_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    here, there = (Driver(small_runner(tmp_path)) for _ in range(2))
    sequence = here.sequence(random_ids(21, VOCAB, 4))
    here.prefill(sequence, 8)
    moved = there.sequence(sequence.token_ids[:21])
    there.sequence([1] * 50)
    there.runner.kv_cache.tensor.fill_(float("nan"))
    moved.token_ids.append(sequence.token_ids[-1])
    moved.num_computed_tokens = 21
    for layer in range(here.runner.config.num_layers):
        payload = here.runner.kv_cache.read(layer, sequence.block_table[:6])
        there.runner.kv_cache.write(layer, moved.block_table[:6], payload)
    assert there.generate([moved], 20) == here.generate([sequence], 20)


def test_a_step_says_which_sequences_have_no_token_yet(runner: ModelRunner) -> None:
    driver = Driver(runner)
    early, late = driver.sequence(random_ids(9, VOCAB, 1)), driver.sequence(random_ids(4, VOCAB, 2))
    first, second = driver.step((early, 5), (late, 4))
    assert first is None
    assert second == late.token_ids[-1]
    assert driver.step((early, 2)) == [None]


def test_logprobs_come_to_those_who_ask_and_with_every_token(runner: ModelRunner) -> None:
    driver = Driver(runner)
    asks, silent = driver.sequence(random_ids(9, VOCAB, 1)), driver.sequence(random_ids(4, VOCAB, 2))
    asks.params = asks.params.model_copy(update={"logprobs": 3})
    driver.step((asks, 5), (silent, 4))
    assert [each and each.logprobs for each in driver.sampled] == [None, None]
    driver.step((asks, 4), (silent, 1))
    told, untold = driver.sampled
    assert told is not None
    assert told == (asks.token_ids[-1], token_logprobs(driver.logits[0].numpy(), asks.token_ids[-1], 3))
    assert untold == (silent.token_ids[-1], None)


def test_an_empty_batch_does_nothing(runner: ModelRunner) -> None:
    assert drain(runner, Batch()) == ([], [])


@pytest.mark.parametrize("change", [{"block_table": [0]}, {"block_table": [0, 10**6]}, {"num_computed_tokens": 3}])
def test_a_sequence_that_does_not_fit_its_blocks_is_refused(change: dict[str, object], runner: ModelRunner) -> None:
    sequence = Driver(runner).sequence(random_ids(6, VOCAB, 1))
    for name, value in change.items():
        setattr(sequence, name, value)
    with pytest.raises(InternalError, match="Request r"):
        drain(runner, Batch((ScheduledSequence(sequence, 6),)))


def test_padding_wastes_little_and_depends_on_length_alone() -> None:
    lengths = range(1, 20_000)
    assert all(length <= padded_positions(length) <= max(128, length * 1.25 + 1, length + 128) for length in lengths)
    assert len({padded_positions(length) for length in lengths}) < 40


def test_devices_and_types_are_checked() -> None:
    cpu = torch.device("cpu")
    assert resolve_device("cpu") == cpu
    assert resolve_dtype("float16", cpu) == torch.float16
    assert resolve_dtype("auto", cpu) in (torch.bfloat16, torch.float32)
    with pytest.raises(StartError, match="tpu"):
        resolve_device("tpu")
    with pytest.raises(StartError, match="int4"):
        resolve_dtype("int4", cpu)
    with pytest.raises(StartError, match="int8"):
        resolve_dtype("int8", cpu)


def test_kv_in_int8_is_for_cpus_and_no_kernels_of_triton() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_kv_dtype("auto", torch.bfloat16, cuda, has_triton=True) == "bfloat16"
    assert resolve_kv_dtype("int8", torch.bfloat16, cpu, has_triton=False) == "int8"
    for device, has_triton in ((cpu, True), (cuda, False), (cuda, True)):
        with pytest.raises(StartError, match="set --kv-cache-dtype to auto, or --device to cpu and --kernels to auto"):
            resolve_kv_dtype("int8", torch.bfloat16, device, has_triton=has_triton)
    with pytest.raises(StartError, match="int4"):
        resolve_kv_dtype("int4", torch.bfloat16, cpu, has_triton=False)


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    checkpoint = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    with pytest.raises(StartError, match="257"):
        load(checkpoint, cache_dir=tmp_path / "cache", native_dir=CACHE_DIR, max_model_len=257)
    options = {"cache_dir": tmp_path / "cache", "native_dir": CACHE_DIR, "device": "cpu"}
    assert load(checkpoint, max_model_len=64, **options).config.max_model_len == 64  # type: ignore[arg-type]
