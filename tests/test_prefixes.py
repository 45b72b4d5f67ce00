"""Names of prefixes, and which blocks of a sequence are found and published by them."""

import os
import subprocess
import sys

import pytest

from kvrelay.blocks import BlockManager
from kvrelay.prefixes import Prefixes, block_hash, root_hash
from kvrelay.types import RequestKey, SamplingParams, Sequence

SIZE = 4


def new_sequence(num_tokens: int, *, salt: str = "", first: int = 0) -> Sequence:
    token_ids = list(range(first, first + num_tokens))
    return Sequence(RequestKey("r", 0), 0, 1, SamplingParams(max_tokens=9), token_ids, num_tokens, cache_salt=salt)


def computed(blocks: BlockManager, prefixes: Prefixes, num_tokens: int, *, salt: str = "") -> Sequence:
    """A sequence whose tokens were computed in one chunk."""
    sequence = new_sequence(num_tokens, salt=salt)
    sequence.block_table = blocks.allocate(blocks.blocks_for(num_tokens))
    sequence.num_computed_tokens = num_tokens
    prefixes.publish(sequence, num_tokens)
    return sequence


def test_names_are_the_same_in_every_process() -> None:
    """Block hashes with a per-process seed never hit between processes."""
    code = "from kvrelay.prefixes import *; print(block_hash(root_hash('model', 'salt'), range(16)).hex())"
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert names == {block_hash(root_hash("model", "salt"), range(16)).hex()}
    assert names == {"59c2076ea8297f9d607557ae9961f7b6cd44602c9192253173ab154b67eeb1d5"}


def test_a_name_covers_every_token_before_it_the_model_and_the_salt() -> None:
    root = root_hash("model", "salt")
    first = block_hash(root, (1, 2))
    names = {
        block_hash(first, (3, 4)),
        block_hash(first, (4, 3)),
        block_hash(block_hash(root, (2, 1)), (3, 4)),
        block_hash(block_hash(root_hash("model", ""), (1, 2)), (3, 4)),
        block_hash(block_hash(root_hash("other", "salt"), (1, 2)), (3, 4)),
        block_hash(block_hash(root_hash("models", "alt"), (1, 2)), (3, 4)),
        block_hash(block_hash(root_hash("", "modelsalt"), (1, 2)), (3, 4)),
        block_hash(root, (1, 2, 3, 4)),
    }
    assert len(names) == 8


def test_only_full_blocks_are_published_and_one_token_is_left_to_compute() -> None:
    blocks = BlockManager(20, SIZE)
    prefixes = Prefixes(blocks, "model")
    first = computed(blocks, prefixes, 11)
    assert prefixes.claim(new_sequence(20)) == first.block_table[:2]
    assert prefixes.claim(new_sequence(11)) == first.block_table[:2]
    assert prefixes.claim(new_sequence(8)) == first.block_table[:1]  # the whole prompt is there; its logits are not
    assert prefixes.claim(new_sequence(4)) == []
    assert prefixes.find(new_sequence(9)) == (2, 2)


def test_each_block_is_published_when_its_last_token_is_computed() -> None:
    blocks = BlockManager(20, SIZE)
    prefixes = Prefixes(blocks, "model")
    sequence = new_sequence(12)
    sequence.block_table = blocks.allocate(3)
    found = []
    for num_tokens in (3, 1, 2, 6):
        sequence.num_computed_tokens += num_tokens
        prefixes.publish(sequence, num_tokens)
        found.append(prefixes.find(new_sequence(30)).num_blocks)
    assert found == [0, 1, 1, 3]


def test_generated_tokens_are_part_of_the_chain() -> None:
    blocks = BlockManager(20, SIZE)
    prefixes = Prefixes(blocks, "model")
    sequence = computed(blocks, prefixes, 6)
    sequence.block_table += blocks.allocate(1)
    for token in (6, 7, 8):
        sequence.token_ids.append(token)
    sequence.num_computed_tokens = 8
    prefixes.publish(sequence, 1)
    assert prefixes.claim(new_sequence(30)) == sequence.block_table[:2]


@pytest.mark.parametrize(("model", "salt"), [("model", "other"), ("other", "mine"), (None, "mine")])
def test_nothing_is_shared_across_salts_and_models_or_without_a_cache(model: str | None, salt: str) -> None:
    blocks = BlockManager(20, SIZE)
    computed(blocks, Prefixes(blocks, "model"), 12, salt="mine")
    assert Prefixes(blocks, model).claim(new_sequence(12, salt=salt)) == []
    assert Prefixes(blocks, model).find(new_sequence(12, salt=salt)) == (0, 0)


def test_without_a_cache_nothing_is_published() -> None:
    blocks = BlockManager(20, SIZE)
    sequence = computed(blocks, Prefixes(blocks), 12)
    blocks.release(sequence.block_table)
    assert blocks.ledger.free == 20
