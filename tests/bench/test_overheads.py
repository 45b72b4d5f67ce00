"""The benchmark of overheads: how a step is cut into parts, and the whole of it with a small load."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.bench.overheads_parts import Step, StepClock, timed
from kvrelay.bench.overheads_steps import figures
from kvrelay.model.runner import ModelRunner
from kvrelay.model.sampler import Sampler
from kvrelay.types import Batch, RequestKey, SamplingParams, ScheduledSequence, Sequence
from tests.places import CACHE_DIR

PLAN_S, LAYER_S, LOGITS_S, SAMPLE_S, BETWEEN_S = 1.0, 10.0, 100.0, 1_000.0, 10_000.0
NUM_LAYERS = 2


class Clock:
    """Stands still but for what is said to take time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Model:
    """Network, forward pass, sampler and all that a runner asks of a KV cache."""

    clock: Clock
    num_layers: int = NUM_LAYERS
    staged: None = None

    @property
    def config(self) -> "Model":
        return self

    def computed(self, layer: int) -> None:
        return

    def begin(self, batch: Batch, kv_cache: Any) -> "Model":
        self.clock.spend(PLAN_S)
        return self

    def compute(self, layer: int) -> None:
        self.clock.spend(LAYER_S)

    def logits(self) -> torch.Tensor:
        self.clock.spend(LOGITS_S)
        return torch.zeros(1, 3)


class SlowSampler(Sampler):
    """Takes its time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        self._clock.spend(SAMPLE_S)
        return [1] * len(sequences)


def steps_of(batches: list[tuple[int, int]]) -> list[Step]:
    """The steps of one sequence after another: prompt tokens, and generated ones before its step."""
    clock = Clock()
    model: Any = Model(clock)
    steps = StepClock(clock)
    runner = timed(ModelRunner(model, model, SlowSampler(clock)), steps)
    for num_prompt, num_generated in batches:
        tokens = [0] * (num_prompt + num_generated)
        done = len(tokens) - 1 if num_generated else 0
        sequence = Sequence(
            RequestKey("r", 0), 0, 1, SamplingParams(max_tokens=9), tokens, num_prompt, num_computed_tokens=done
        )
        for _ in runner.run(Batch((ScheduledSequence(sequence, len(tokens) - done),))):
            continue
        clock.spend(BETWEEN_S)
    return steps.steps


def test_each_part_of_a_step_is_what_it_took() -> None:
    kernels_s, rest_s = NUM_LAYERS * LAYER_S + LOGITS_S, PLAN_S + BETWEEN_S
    assert steps_of([(5, 1), (5, 2), (5, 3)]) == [Step(1, True, kernels_s, SAMPLE_S, rest_s)] * 2


@pytest.mark.parametrize("num_prompt", [1, 5])
def test_a_prompt_is_no_decode_step(num_prompt: int) -> None:
    assert [step.decodes for step in steps_of([(num_prompt, 0), (num_prompt, 1), (num_prompt, 2)])] == [False, True]


def test_a_step_is_its_parts() -> None:
    step = Step(num_sequences=4, decodes=True, kernels_s=0.08, sampling_s=0.005, rest_s=0.015)
    told = figures([step, dataclasses.replace(step, kernels_s=1.0, sampling_s=0.001), step])
    expected = {"kernels_ms": 80, "sampling_ms": 5, "rest_ms": 15, "outside_ms": 20, "step_ms": 100}
    assert told == pytest.approx({"steps": 3, "outside_percent": 20, **expected})


def test_it_measures_steps_and_an_idle_cluster(tmp_path: Path) -> None:
    path = tmp_path / "overheads.json"
    arms = ["--quantization", "auto", "--sequences", "1", "2", "--temperature", "1"]
    load = ["--input-len", "5", "--output-len", "6", "--idle-s", "1"]
    places = ["--cache-dir", str(CACHE_DIR), "--json", str(path)]
    subprocess.run(
        [sys.executable, "-m", "kvrelay.bench.overheads", *arms, *load, *places],
        check=True,
        timeout=100,
        capture_output=True,
    )
    rows = json.loads(path.read_text())["rows"]
    steps, idle = rows[:2], rows[2:]
    # The first token of each comes of its prompt; the other five are of one step each, with both prompts in one step.
    assert [(row["quantization"], row["sequences"], row["steps"]) for row in steps] == [("auto", 1, 4), ("auto", 2, 4)]
    for row in steps:
        parts_ms = [row["kernels_ms"], row["sampling_ms"], row["rest_ms"]]
        assert min(parts_ms) > 0
        assert row["step_ms"] == pytest.approx(sum(parts_ms))
    assert [row["process"] for row in idle] == ["gateway", "prefill-0", "decode-0", "all"]
    assert idle[-1]["cpu_percent"] == pytest.approx(sum(row["cpu_percent"] for row in idle[:-1]))
    assert idle[-1]["cpu_percent"] > 0
