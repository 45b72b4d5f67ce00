"""The model on Triton's kernels, interpreted: close to plain torch, and each token's bits its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from kvrelay.bench.gpu_costs import Decoder
from kvrelay.bench.gpu_model import write_random_model
from kvrelay.checkpoint import resolve
from kvrelay.errors import InternalError, ModelError, StartError
from kvrelay.model.load import load, takes_triton
from kvrelay.model.packed_weights import Quantization
from kvrelay.model.runner import ModelRunner
from kvrelay.model.sampler import Sampler
from kvrelay.model.triton_sampler import TritonSampler
from kvrelay.types import Batch, ScheduledSequence
from tests.kernels.interpreted import interpret_everywhere
from tests.kernels.sampled import sequences, tied_logits
from tests.model.conftest import Driver, drain, random_ids
from tests.model.sameness import alone, same, shared_and_resumed, together
from tests.model.test_gguf import VOCAB, write_gguf
from tests.tiny_model import write_tiny_model

Q = GGMLQuantizationType
LENGTHS = (1, 9, 35)
NUM_TOKENS = 2
# Infinite logits are meant, and numpy, which interprets, remarks on their differences.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpret_everywhere(patch)
        yield


def runner_of(
    model: Path,
    kernels: str = "triton",
    block_size: int = 16,
    dtype: str = "float32",
    quantization: Quantization = Quantization.NONE,
) -> ModelRunner:
    cache_dir = model.parent / "cache"
    checkpoint = resolve(str(model), cache_dir)
    return load(
        checkpoint,
        cache_dir=cache_dir,
        device="cpu",
        dtype=dtype,
        kernels=kernels,
        block_size=block_size,
        kv_memory_bytes=4 << 20,
        max_model_len=256,
        quantization=quantization,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "m.gguf", "qwen3")
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "folder"])
def test_logits_and_tokens_are_those_of_torch(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    _ = write_tiny_model(path) if arch == "folder" else write_gguf(path, arch)
    ours, plain = (Driver(runner_of(path, kernels)) for kernels in ("triton", "torch"))
    prompts, found = [random_ids(length, VOCAB, length) for length in (20, 1, 9)], []
    for driver in (ours, plain):
        rows = [driver.sequence(prompt) for prompt in prompts]
        driver.step((rows[0], 13), (rows[1], 1), (rows[2], 9))  # some sample, some decode, and not in this order
        found.append([driver.logits])
        driver.step((rows[0], 7), (rows[1], 1), (rows[2], 1))
        driver.step(*((row, 1) for row in rows))
        found[-1].append(driver.logits)
        found[-1].append(torch.tensor([row.token_ids[-3:] for row in rows[::2]]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "quantization", "forms"),
    [(Q.Q4_1, "auto", "int4"), (Q.Q8_0, "auto", "int8"), (Q.F32, "auto", "fp32"), (Q.F32, "int8", "int8")],
)
def test_weights_in_codes_are_those_of_the_file(
    kind: GGMLQuantizationType, quantization: str, forms: str, tmp_path: Path
) -> None:
    path, logits = tmp_path / "m.gguf", []
    write_gguf(path, "qwen2", kind=kind)
    for kernels, kept in (("triton", quantization), ("torch", "none")):
        driver = Driver(runner_of(path, kernels, quantization=Quantization(kept)))
        row = driver.sequence(random_ids(9, VOCAB, 1))
        logits.append(driver.prefill(row, 9))
        if kernels == "triton":
            assert driver.runner.network.weights == forms
    tolerance = 0.03 if (kind, quantization) == (Q.F32, "int8") else 1e-4
    assert (logits[0] - logits[1]).abs().max() < tolerance * logits[1].abs().max()
    assert quantization != "int8" or not torch.equal(*logits)


def test_weights_that_gpus_cannot_multiply_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(StartError, match="to auto, none or int8"):
        runner_of(model, quantization=Quantization.INT4)
    write_random_model(tmp_path / "odd", Decoder(1, 40, 2, 1, 16, 32, 50), 256, seed=1, device=CPU)
    with pytest.raises(ModelError, match="40 inputs, no whole groups of 32"):
        runner_of(tmp_path / "odd", quantization=Quantization.INT8)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_logits_have_the_same_bits_in_every_batch_chunk_and_block_size(dtype: str, model: Path) -> None:
    driver = Driver(runner_of(model, dtype=dtype))
    prompts = [random_ids(length, VOCAB, length) for length in LENGTHS]
    expected = [alone(driver, prompt, NUM_TOKENS) for prompt in prompts]
    for chunk in (1, 7):
        assert same(alone(driver, prompts[1], NUM_TOKENS, chunk), expected[1])
    assert same(alone(Driver(runner_of(model, block_size=8, dtype=dtype)), prompts[-1], NUM_TOKENS, 33), expected[-1])
    assert all(map(same, together(driver, prompts, NUM_TOKENS), expected))


def test_a_sequence_that_goes_on_after_a_prompt_it_shares_has_the_same_bits(model: Path) -> None:
    """What a prefix cache does, and what preemption and a new start do."""
    driver = Driver(runner_of(model))
    prompt = random_ids(20, VOCAB, 3)
    assert same(shared_and_resumed(driver, prompt, 16), alone(driver, prompt, 2))


def test_garbage_never_reaches_a_result_and_does_not_stay_in_begun_blocks(model: Path) -> None:
    clean, poisoned = (Driver(runner_of(model, block_size=8)) for _ in range(2))
    kv = poisoned.runner.kv_cache.tensor
    kv.fill_(torch.nan)
    prompt = random_ids(10, VOCAB, 2)
    assert same(alone(poisoned, prompt, NUM_TOKENS, 4), alone(clean, prompt, NUM_TOKENS, 4))
    used = kv[0, ~kv[0].isnan().flatten(1).all(1)]
    assert len(used) == 2
    assert used.isfinite().all()


def test_tokens_are_those_of_the_sampler() -> None:
    logits, known = tied_logits(12, 331, seed=1), sequences(12, 331, seed=2)
    assert TritonSampler().sample(logits, known) == Sampler().sample(logits, known)


def test_a_step_gives_the_tokens_and_logprobs_of_torch(model: Path) -> None:
    found = []
    for kernels in ("triton", "torch"):
        driver = Driver(runner := runner_of(model, kernels))
        rows = [driver.sequence(random_ids(5, VOCAB, seed), temperature=1.3, seed=seed) for seed in (1, 2)]
        rows[1].params = rows[1].params.model_copy(update={"logprobs": 2})
        found.append(drain(runner, Batch(tuple(ScheduledSequence(row, 5) for row in rows)))[1])
    (first, second), (expected_first, expected_second) = found
    assert first == expected_first
    assert second is not None
    assert expected_second is not None
    assert second.token_id == expected_second.token_id
    assert second.logprobs is not None
    assert expected_second.logprobs is not None
    assert second.logprobs.logprob == pytest.approx(expected_second.logprobs.logprob, abs=1e-5)
    assert len(second.logprobs.top) == 2


def test_a_best_logit_that_is_no_number_is_told_of_its_request() -> None:
    logits, known = torch.zeros(2, 50), sequences(2, 50, seed=3)
    known[1].key = known[1].key._replace(request_id="this")
    logits[1, 7] = torch.nan
    with pytest.raises(InternalError, match="Request this: the network gave nan"):
        TritonSampler().sample(logits, known)


def test_kernels_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.model.load.IS_INTERPRETED", False)
    assert [takes_triton(name, CUDA) for name in ("auto", "triton", "torch")] == [True, True, False]
    assert [takes_triton(name, CPU) for name in ("auto", "torch")] == [False, False]
    with pytest.raises(StartError, match="the device is cpu"):
        takes_triton("triton", CPU)
    monkeypatch.setattr("kvrelay.model.load.HAS_TRITON", False)
    assert not takes_triton("auto", CPU)
    for name in ("auto", "triton", "torch"):
        with pytest.raises(StartError, match="Triton is not installed"):
            takes_triton(name, CUDA)
