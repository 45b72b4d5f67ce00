"""Where the time of a worker's steps goes: clocks around the network's kernels and around the sampler."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.model.config import ModelConfig
from kvrelay.model.forward import ForwardPass, Network
from kvrelay.model.kv_cache import KVCache
from kvrelay.model.runner import ModelRunner
from kvrelay.model.sampler import Sampler
from kvrelay.types import Batch, Sequence


@dataclass(frozen=True, slots=True)
class Step:
    """One step, from the planning of its forward pass to that of the next one, in seconds.

    `kernels_s` are layers and logits, `sampling_s` is the choice of tokens, `rest_s` everything else.
    """

    num_sequences: int
    decodes: bool  # each of its sequences gets its next token, and no prompt is computed
    kernels_s: float
    sampling_s: float
    rest_s: float


class StepClock:
    """Cuts the time of a compute loop into steps. For one thread, and one loop from its first step on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, in seconds."""
        self.read = clock
        self.kernels_s = 0.0  # of the step under way
        self.sampling_s = 0.0
        self.steps: list[Step] = []  # those that ended: another one has begun
        self._begun_s = 0.0
        self._under_way: tuple[int, bool] | None = None

    def begin(self, batch: Batch) -> None:
        """The step before ends here, and that of `batch` begins."""
        now = self.read()
        if self._under_way is not None:
            rest_s = now - self._begun_s - self.kernels_s - self.sampling_s
            self.steps.append(Step(*self._under_way, self.kernels_s, self.sampling_s, rest_s))
        self._under_way = len(batch.scheduled), all(_decodes(item.sequence) for item in batch.scheduled)
        self._begun_s, self.kernels_s, self.sampling_s = now, 0.0, 0.0


def timed(runner: ModelRunner, clock: StepClock) -> ModelRunner:
    """The same runner, on the same KV cache, with its steps noted."""
    return ModelRunner(TimedNetwork(runner.network, clock), runner.kv_cache, TimedSampler(runner.sampler, clock))


@dataclass(frozen=True, slots=True)
class TimedNetwork:
    """See `forward.Network`."""

    network: Network
    clock: StepClock

    @property
    def config(self) -> ModelConfig:
        """The network's."""
        return self.network.config

    @property
    def device(self) -> torch.device:
        """The network's."""
        return self.network.device

    @property
    def weights(self) -> str:
        """The network's."""
        return self.network.weights

    def begin(self, batch: Batch, kv_cache: KVCache) -> "TimedPass":
        """Planning is no kernel: it is in the rest of the step."""
        self.clock.begin(batch)
        return TimedPass(self.network.begin(batch, kv_cache), self.clock)


@dataclass(frozen=True, slots=True)
class TimedPass:
    """See `forward.ForwardPass`."""

    forward: ForwardPass
    clock: StepClock

    def compute(self, layer: int) -> None:
        """The next layer."""
        begin = self.clock.read()
        self.forward.compute(layer)
        self.clock.kernels_s += self.clock.read() - begin

    def logits(self) -> torch.Tensor:
        """float32 `[rows, vocab]` of what samples."""
        begin = self.clock.read()
        logits = self.forward.logits()
        self.clock.kernels_s += self.clock.read() - begin
        return logits


class TimedSampler(Sampler):
    """Another sampler with a clock around it."""

    def __init__(self, sampler: Sampler, clock: StepClock) -> None:
        self._sampler = sampler
        self._clock = clock

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """See `Sampler.sample`."""
        begin = self._clock.read()
        token_ids = self._sampler.sample(logits, sequences)
        self._clock.sampling_s += self._clock.read() - begin
        return token_ids


def _decodes(sequence: Sequence) -> bool:
    return sequence.num_generated_tokens > 0 and sequence.num_uncomputed_tokens == 1
