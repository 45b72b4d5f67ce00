"""The ledger of KV blocks: every block of a worker is free, cached, leased or revoked, and none is ever lost."""

from collections import deque
from collections.abc import Sequence

from kvrelay.messages import Ledger


class BlockManager:
    """Hands out block ids and takes them back.

    A block is *free*, *leased* (a sequence or an uncommitted grant uses it) or *revoked* (its lease ended, but a
    remote sender may still write into it). Only `release` and `confirm` make a block free again. Nothing is *cached*
    yet: prefixes are not shared between requests.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Starts with all `num_blocks` blocks free.

        Raises:
            ValueError: a size below 1.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"A block manager needs at least one block of one token, not {num_blocks} of {block_size}."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._leased: set[int] = set()
        self._revoked: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def ledger(self) -> Ledger:
        """Counts by state."""
        return Ledger(
            total=self.num_blocks,
            free=len(self._free),
            cached=0,
            leased=len(self._leased),
            revoked=len(self._revoked),
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Leases `count` free blocks, those free for longest first.

        Raises:
            ValueError: fewer than `count` are free, or it is negative; the ledger is unchanged.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} blocks were asked for and {len(self._free)} are free.")
        block_ids = [self._free.popleft() for _ in range(count)]
        self._leased.update(block_ids)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Leased blocks become free.

        Raises:
            ValueError: a block is not leased, or is named twice; the ledger is unchanged.
        """
        self._take(block_ids, self._leased, "leased")
        self._free.extend(block_ids)

    def revoke(self, block_ids: Sequence[int]) -> None:
        """Leased blocks whose lease ended while the sender may still write: out of use until `confirm`.

        Raises:
            ValueError: a block is not leased, or is named twice; the ledger is unchanged.
        """
        self._take(block_ids, self._leased, "leased")
        self._revoked.update(block_ids)

    def confirm(self, block_ids: Sequence[int]) -> None:
        """The sender said that it writes no more (or is gone): revoked blocks become free.

        Raises:
            ValueError: a block is not revoked, or is named twice; the ledger is unchanged.
        """
        self._take(block_ids, self._revoked, "revoked")
        self._free.extend(block_ids)

    @staticmethod
    def _take(block_ids: Sequence[int], state: set[int], name: str) -> None:
        wrong = set(block_ids) - state
        if wrong or len(set(block_ids)) != len(block_ids):
            raise ValueError(f"Blocks {sorted(wrong) or list(block_ids)} are not {name}, or are named twice.")
        state.difference_update(block_ids)
