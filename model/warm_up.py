"""The first steps of a runner, of nobody's tokens: kernels are compiled by them and not while somebody waits."""

from kvrelay.model.runner import ModelRunner
from kvrelay.types import Batch, RequestKey, SamplingParams, ScheduledSequence, Sequence

_PROMPT = 2


def warm_up(runner: ModelRunner) -> None:
    """Prefills a prompt and decodes a token, in block 0, before anybody has a block."""
    params = SamplingParams(max_tokens=2, temperature=1.0)
    sequence = Sequence(RequestKey("warm-up", 0), 0, 0, params, [0] * _PROMPT, _PROMPT, [0])
    for num_tokens in (_PROMPT, 1):
        steps = runner.run(Batch((ScheduledSequence(sequence, num_tokens),)))
        for _ in steps:
            pass
        sequence.num_computed_tokens += num_tokens
        sequence.token_ids.append(0)
