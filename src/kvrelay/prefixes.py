"""The prefix cache: which KV blocks hold the beginning of a sequence already, because another one had the same.

A full block is named by a chain of SHA-256 hashes: over the name of the block before it and its own token ids, the
first one over the model's fingerprint and the request's cache salt (the scheme of vLLM's automatic prefix caching). So
a name stands for all tokens up to its block's end, and is the same in every process. Python's own `hash` is not: it is
seeded anew in each, and collisions can be made at will, which here would give one user another's KV.
"""

import struct
from collections.abc import Sequence as Items
from hashlib import sha256
from itertools import islice

from kvrelay.blocks import BlockManager, Found
from kvrelay.types import Sequence


def root_hash(fingerprint: str, cache_salt: str) -> bytes:
    """What a chain begins with. Each text is hashed by itself, so that no two pairs can run into each other."""
    return sha256(sha256(fingerprint.encode()).digest() + sha256(cache_salt.encode()).digest()).digest()


def block_hash(parent: bytes, token_ids: Items[int]) -> bytes:
    """The name of a full block after `parent`; tokens count as 32 bits, little-endian."""
    return sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


class Prefixes:
    """Finds and publishes the leading blocks of sequences in one worker's block ledger."""

    def __init__(self, blocks: BlockManager, fingerprint: str | None = None) -> None:
        """`fingerprint` names the model whose KV is in `blocks`. Without one there is no cache: nothing is found."""
        self._blocks = blocks
        self._fingerprint = fingerprint

    def extend(self, hashes: list[bytes], token_ids: Items[int], cache_salt: str) -> list[bytes]:
        """Appends the names that `hashes` lacks of the full blocks of `token_ids`, and returns it."""
        if self._fingerprint is None:
            return hashes
        size = self._blocks.block_size
        parent = hashes[-1] if hashes else root_hash(self._fingerprint, cache_salt)
        for index in range(len(hashes), len(token_ids) // size):
            parent = block_hash(parent, token_ids[index * size : (index + 1) * size])
            hashes.append(parent)
        return hashes

    def find(self, sequence: Sequence) -> Found:
        """What `claim` would find now."""
        return self._blocks.find(self._wanted(sequence))

    def claim(self, sequence: Sequence) -> list[int]:
        """Leases the blocks that hold the beginning of a sequence; the caller must release them.

        At least one token is left to be computed, since only that gives the next.
        """
        return self._blocks.match(self._wanted(sequence))

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks that the newest `num_tokens` computed tokens of a sequence have filled can be found from now on."""
        size = self._blocks.block_size
        first, end = (sequence.num_computed_tokens - num_tokens) // size, sequence.num_computed_tokens // size
        if self._fingerprint is not None and first < end:
            hashes = self.extend(sequence.block_hashes, sequence.token_ids, sequence.cache_salt)
            self._blocks.publish(sequence.block_table[first:end], hashes[first:end])

    def _wanted(self, sequence: Sequence) -> "islice[bytes]":
        hashes = self.extend(sequence.block_hashes, sequence.token_ids, sequence.cache_salt)
        return islice(hashes, (len(sequence.token_ids) - 1) // self._blocks.block_size)
