"""Decode steps of recorded sizes: which is chosen, what fills it up, and that nothing of it reaches a result."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvrelay.checkpoint import Checkpoint, resolve
from kvrelay.config import WorkerSettings
from kvrelay.errors import MemoryShortage
from kvrelay.model.graphed_network import GraphedNetwork, Replay, row_sizes, table_sizes
from kvrelay.model.load import load, prepared
from kvrelay.model.runner import ModelRunner
from kvrelay.model.served import load_served
from kvrelay.model.triton_network import TritonNetwork, build_triton
from kvrelay.model.weights import read_config, read_weights
from kvrelay.types import Role
from tests.kernels.interpreted import interpret_everywhere
from tests.model.conftest import Driver, random_ids
from tests.model.test_gguf import VOCAB, write_gguf

MAX_ROWS = 6


@dataclass
class EagerCapture:
    """Records functions, and calls them again to replay them; tells which was replayed, in the order of recording."""

    num_recorded: int = 0
    replayed: list[int] = field(default_factory=list)

    def __call__(self, function: Callable[[], None]) -> Replay:
        number, self.num_recorded = self.num_recorded, self.num_recorded + 1
        function()

        def replay() -> None:
            self.replayed.append(number)
            function()

        return replay


@dataclass
class Pair:
    """The same model with and without recorded steps, and the sizes of those, in the order of recording."""

    graphed: Driver
    eager: Driver
    capture: EagerCapture
    sizes: list[tuple[int, int]]
    torch: ModelRunner  # the same on plain torch

    def replayed(self) -> list[tuple[int, int]]:
        """Sizes since the last call."""
        numbers, self.capture.replayed = self.capture.replayed, []
        return [self.sizes[number] for number in numbers]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """On the kernels' twins, with contexts of 16 and 64 positions recorded, in blocks of 4, of 80 at most."""
    monkeypatch.setattr("kvrelay.model.graphed_network._FIRST_CONTEXT", 16)
    return pair_of(tmp_path)


def pair_of(tmp_path: Path) -> Pair:
    write_gguf(tmp_path / "m.gguf", "qwen3")
    checkpoint, cache_dir = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache"), tmp_path / "cache"
    plain, other = (
        load(checkpoint, cache_dir=cache_dir, device="cpu", dtype="float32", kernels="torch", block_size=4,
             kv_memory_bytes=1 << 20, max_model_len=80)
        for _ in range(2)
    )  # fmt: skip
    config = plain.config
    weights = read_weights(checkpoint, read_config(checkpoint), torch.float32, cache_dir)
    network: TritonNetwork = build_triton(config, weights, torch.float32, torch.device("cpu"))
    capture = EagerCapture()
    graphed = GraphedNetwork(network, plain.kv_cache, MAX_ROWS, capture)
    sizes = [(rows, blocks) for rows in (6, 4, 2, 1) for blocks in reversed(table_sizes(80, 4))]
    return Pair(
        Driver(ModelRunner(graphed, plain.kv_cache, plain.sampler)),
        Driver(ModelRunner(network, other.kv_cache, other.sampler)),
        capture,
        sizes,
        other,
    )


def test_sizes() -> None:
    assert row_sizes(1) == [1]
    assert row_sizes(6) == [1, 2, 4, 6]
    assert row_sizes(64) == [1, 2, 4, 8, 16, 32, 64]
    assert table_sizes(2048, 16) == [128]
    assert table_sizes(100_000, 16) == [128, 512, 2048, 6250]
    assert table_sizes(100, 16) == [7]


def test_a_step_is_filled_up_to_the_next_size_and_gives_what_it_gives_alone(pair: Pair) -> None:
    assert pair.capture.num_recorded == len(pair.sizes) == 12
    found, replayed = [], list[tuple[int, int]]()
    for driver in (pair.graphed, pair.eager):
        logits = []
        rows = [driver.sequence(random_ids(length, VOCAB, length), 30) for length in (3, 11, 15, 2, 30, 9)]
        for row in rows:
            driver.prefill(row, 7)
        pair.replayed()  # of chunks with one token
        for chosen in ([0], [3], [0, 1], [0, 1, 2], [2, 3], [0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5], [1, 0]):
            driver.step(*((rows[index], 1) for index in chosen))
            logits.append(driver.logits)
        found.append(logits)
        replayed += pair.replayed()
    assert replayed == [(1, 4), (1, 4), (2, 4), (4, 4), (2, 16), (6, 16), (6, 16), (2, 4)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_kv_of_a_recorded_step_is_that_of_any_other_and_nothing_else_is_written(pair: Pair) -> None:
    for driver in (pair.graphed, pair.eager):
        driver.runner.kv_cache.tensor.fill_(3.0)
        rows = [driver.sequence(random_ids(length, VOCAB, length), 12) for length in (4, 6, 7)]
        for row in rows:
            driver.prefill(row, 100)
        driver.generate(rows, 2)
    torch.testing.assert_close(pair.graphed.runner.kv_cache.tensor, pair.eager.runner.kv_cache.tensor)
    begun = pair.graphed.runner.kv_cache.tensor[:, rows[0].block_table[1]]
    assert (begun[..., 2:, :] == 0).all()
    assert len(pair.replayed()) == 2


def test_steps_that_fit_no_size_are_not_recorded_ones(pair: Pair) -> None:
    driver = pair.graphed
    rows = [driver.sequence(random_ids(length, VOCAB, length), 4) for length in (3, 4, 5, 6, 7, 8, 9)]
    driver.step(*((row, row.num_prompt_tokens) for row in rows))  # chunks
    driver.step(*((row, 1) for row in rows))  # more rows than any
    late = driver.sequence(random_ids(3, VOCAB, 1))
    driver.step((rows[0], 1), (late, 1))  # does not sample
    driver.step((rows[0], 1), (late, 2))  # decodes beside a chunk
    assert pair.replayed() == []
    driver.step((rows[0], 1), (late, 1))
    assert pair.replayed() == [(2, 4)]


def test_another_cache_is_computed_without_recorded_steps(pair: Pair) -> None:
    driver = Driver(ModelRunner(pair.graphed.runner.network, pair.eager.runner.kv_cache, pair.eager.runner.sampler))
    row, same = driver.sequence([5], 4), pair.eager.sequence([5], 4)
    driver.step((row, 1))
    pair.eager.step((same, 1))
    assert torch.equal(driver.logits, pair.eager.logits)
    assert pair.replayed() == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_filling_up_changes_no_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels themselves, interpreted."""
    monkeypatch.setattr("kvrelay.model.graphed_network._FIRST_CONTEXT", 64)
    interpret_everywhere(monkeypatch)
    monkeypatch.setattr("tests.model.test_graphed_network.MAX_ROWS", 4)
    pair = pair_of(tmp_path)
    for driver in (pair.graphed, pair.eager):
        rows = [driver.sequence(random_ids(length, VOCAB, length), 8) for length in (3, 9, 40)]
        for row in rows:
            driver.prefill(row, 100)
        driver.generate(rows, 1)
    assert torch.equal(pair.graphed.logits, pair.eager.logits)
    assert len(pair.capture.replayed) == 1


def test_a_runner_is_prepared_in_its_first_block(pair: Pair) -> None:
    runner, capture = pair.eager.runner, EagerCapture()
    runner.kv_cache.tensor.fill_(3.0)
    prepared(runner.network, runner.kv_cache, runner.sampler, 1, capture)
    assert capture.num_recorded == 3
    assert capture.replayed == [2]
    assert (runner.kv_cache.tensor[:, 1:] == 3.0).all()
    assert (runner.kv_cache.tensor[:, 0, :, :, :3] != 3.0).any(-1).all()


def test_a_network_of_torch_is_prepared_without_recorded_steps(pair: Pair) -> None:
    runner, capture = pair.torch, EagerCapture()
    assert prepared(runner.network, runner.kv_cache, runner.sampler, 1, capture).network is runner.network
    assert capture.num_recorded == 0


def test_a_device_without_room_for_a_step_is_said(pair: Pair) -> None:
    def full(function: Callable[[], None]) -> Replay:
        raise torch.OutOfMemoryError("of the device")

    runner = pair.eager.runner
    with pytest.raises(MemoryShortage, match="lower --kv-memory"):
        prepared(runner.network, runner.kv_cache, runner.sampler, 1, full)


@pytest.mark.parametrize(("role", "max_rows"), [(Role.PREFILL, 0), (Role.DECODE, 5), (Role.BOTH, 5)])
def test_workers_that_decode_record_steps_of_all_that_they_run_at_once(
    role: Role, max_rows: int, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {}

    def load_nothing(checkpoint: Checkpoint, **options: object) -> ModelRunner:
        given.update(options)
        return pair.eager.runner

    monkeypatch.setattr("kvrelay.model.served.load", load_nothing)
    load_served(WorkerSettings(role=role, model=str(tmp_path / "m.gguf"), cache_dir=tmp_path / "cache", max_num_seqs=5))
    assert given["max_decode_rows"] == max_rows
