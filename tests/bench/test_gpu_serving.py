"""The end-to-end check of a GPU, as far as it needs none: the random model, and real workers that serve it on a CPU."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvrelay.bench import gpu_serving
from kvrelay.bench.gpu_costs import LLAMA_1B, Decoder, step_bytes
from kvrelay.bench.gpu_engine import load_runner, step_seconds
from kvrelay.bench.gpu_kernels import Rates
from kvrelay.bench.gpu_model import write_random_model
from kvrelay.bench.gpu_serving import Sizes
from kvrelay.bench.verify_compare import Answer
from kvrelay.checkpoint import resolve
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.model.weights import read_config, read_weights
from tests.places import CACHE_DIR

CPU = torch.device("cpu")
DECODER = Decoder(num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=64, vocab=300)
SIZES = Sizes(
    decoder=DECODER,
    max_model_len=256,
    steps=((1, 20), (3, 30)),
    loads=(1, 3),
    input_len=20,
    output_len=6,
    num_questions=8,
    served_kv_bytes=8 << 20,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "tiny"
    write_random_model(path, DECODER, SIZES.max_model_len, 1, CPU)
    return path


def test_the_model_is_what_its_costs_are_told_of(model: Path, tmp_path: Path) -> None:
    checkpoint = resolve(str(model), tmp_path)
    config = read_config(checkpoint)
    assert (config.num_layers, config.head_dim, config.max_model_len) == (2, 16, 256)
    weights = read_weights(checkpoint, config, torch.bfloat16, tmp_path)
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    assert sum(weight.nbytes for weight in matrices) == step_bytes(DECODER, 0, 0)
    assert all(0.8 < weight.float().std() * weight.shape[1] ** 0.5 < 1.2 for weight in matrices)
    assert Tokenizer.load(checkpoint).vocab_size == DECODER.vocab


def test_the_same_seed_gives_the_same_model(model: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 1), ("other", 2)):
        write_random_model(tmp_path / name, DECODER, SIZES.max_model_len, seed, CPU)
    first, same, other = (resolve(str(path), tmp_path) for path in (model, tmp_path / "same", tmp_path / "other"))
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_a_step_of_a_worker_is_measured(model: Path, tmp_path: Path) -> None:
    runner = load_runner(model, tmp_path, "cpu", 3, 1 << 20, CACHE_DIR)
    assert 0 < step_seconds(runner, 2, 17, steps=3) < 60
    written = runner.kv_cache.tensor[0].flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [1, 3]  # of two blocks each, the second of which was begun
    rows = list(gpu_serving.step_rows(runner, SIZES, Rates(1e12, 1e12)))
    assert [row["shape"] for row in rows] == ["1 x 20", "3 x 30"]


def test_real_workers_give_the_same_answers_together_and_apart(model: Path) -> None:
    rows, comparison = gpu_serving.serve(model, SIZES, seed=3, device="cpu")
    assert [(row["arm"], row["at_a_time"]) for row in rows] == [("both", 1), ("both", 3), ("1P1D", 1), ("1P1D", 3)]
    assert all(row["tokens_per_s"] > 0 and row["other_ids"] == 0 for row in rows)
    assert [(arm.requests, arm.mismatches) for arm in comparison.arms] == [(8 + 2 + 6, 0)] * 2
    assert comparison.arms[1].compared == 8


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is there for Linux")
def test_real_workers_compute_with_tritons_kernels(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Interpreted, so that it is little that they compute."""
    for name, value in {"TRITON_INTERPRET": "1", "KVRELAY_KERNELS": "triton", "KVRELAY_DTYPE": "float32"}.items():
        monkeypatch.setenv(name, value)
    sizes = replace(SIZES, loads=(1,), input_len=5, output_len=3, num_questions=0)
    rows, comparison = gpu_serving.serve(model, sizes, seed=3, device="cpu")
    assert [(row["arm"], row["other_ids"]) for row in rows] == [("both", 0), ("1P1D", 0)]
    assert comparison.mismatches == 0


def test_other_answers_are_counted(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    answers = iter([[(1, 2), (3, 4)], [(1, 2), (3, 5)]])
    monkeypatch.setattr(gpu_serving, "running", lambda **_: Url())
    monkeypatch.setattr(gpu_serving, "ask", lambda url, plan, take: [take(each, Answer()) for each in plan[0]])
    monkeypatch.setattr(gpu_serving, "_measured", lambda *_: ({"tokens_per_s": 1.0}, next(answers)))
    rows, comparison = gpu_serving.serve(model, replace(SIZES, loads=(2,)), seed=3, device="cpu")
    assert [row["other_ids"] for row in rows] == [0, 1]
    assert comparison.mismatches == 1


class Url:
    """A cluster that nobody asks."""

    def __enter__(self) -> str:
        return "http://nowhere"

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_serving"])
    with pytest.raises(SystemExit) as ended:
        gpu_serving.main()
    assert ended.value.code == 2
    assert "torch sees none here" in capsys.readouterr().err


def test_what_is_measured_fits_the_kv_memory() -> None:
    sizes = Sizes()
    assert sizes.decoder is LLAMA_1B
    bytes_per_token = LLAMA_1B.num_layers * LLAMA_1B.kv_values * 2
    assert all(batch * (context + 64) * bytes_per_token <= sizes.steps_kv_bytes for batch, context in sizes.steps)
    assert all(context + 64 <= sizes.max_model_len for _, context in sizes.steps)
