"""Logits of the same tokens, computed in the ways that must not change a bit of them."""

import torch

from tests.model.conftest import Driver

Logits = list[torch.Tensor]  # of the tokens after a prompt, in order


def alone(driver: Driver, prompt: list[int], num_tokens: int, chunk: int = 1000) -> Logits:
    """One sequence by itself."""
    sequence = driver.sequence(prompt)
    found = [driver.prefill(sequence, chunk).clone()]
    for _ in range(num_tokens - 1):
        driver.step((sequence, 1))
        found.append(driver.logits[0].clone())
    return found


def together(driver: Driver, prompts: list[list[int]], num_tokens: int) -> list[Logits]:
    """All prompts in one step, and then their sequences in the other order."""
    sequences = [driver.sequence(prompt) for prompt in prompts]
    driver.step(*((sequence, sequence.num_prompt_tokens) for sequence in sequences))
    steps = [driver.logits.clone()]
    for _ in range(num_tokens - 1):
        driver.step(*((sequence, 1) for sequence in reversed(sequences)))
        steps.append(driver.logits.flip(0))
    return [[step[row] for step in steps] for row in range(len(prompts))]


def shared_and_resumed(driver: Driver, prompt: list[int], num_shared: int) -> Logits:
    """Of two tokens: what a prefix cache does with whole blocks, and what preemption and a new start do."""
    first, second = driver.sequence(prompt), driver.sequence(prompt)
    driver.prefill(first, 1000)
    num_blocks = driver.runner.kv_cache.layout.num_blocks(num_shared)
    second.block_table[:num_blocks] = first.block_table[:num_blocks]
    second.num_computed_tokens = num_shared
    found = [driver.prefill(second, 1000).clone()]
    driver.step((second, 1))
    resumed = driver.sequence(second.token_ids[: len(prompt) + 1])
    return [*found, driver.prefill(resumed, 1000).clone()]


def same(some: Logits, others: Logits) -> bool:
    """Bit for bit, and as many."""
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
