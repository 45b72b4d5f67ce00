"""The ledger of KV blocks: every block of a worker is free, cached, leased or revoked, and none is ever lost.

           allocate                    release by the last user
free ─────────────────▶ leased ────────────────────────────────▶ cached   (published: it has a name)
 ▲ ▲                     │ │ ▲                                     │ │
 │ └── release (no name) ┘ │ └────────────── match ────────────────┘ │
 │                         └─ revoke ─▶ revoked ─ confirm ─▶ free    │
 └──────────────── evicted by allocate, or forgotten ────────────────┘
"""

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from kvrelay.messages import Ledger


class Found(NamedTuple):
    """How many leading blocks of a prefix there are, and how many of the first of them somebody uses now."""

    num_blocks: int
    num_in_use: int


class BlockManager:
    """Hands out block ids and takes them back, and finds published blocks again by name.

    A block is *free*, *leased* (sequences or uncommitted grants use it: one, or several that share it), *cached*
    (published, and nobody uses it) or *revoked* (its lease ended, but a remote sender may still write into it). A
    block in use is leased, whether it is published or not, and counts once.

    Names are hashes of token prefixes (see `prefixes`). Cached blocks are evicted when free ones run out, those unused
    for longest first (LRU, as in vLLM's automatic prefix caching; Kwon et al., 2023).
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
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused for longest first
        self._users: dict[int, int] = {}  # of each leased block
        self._revoked: set[int] = set()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now: free ones, and cached ones, which it evicts."""
        return len(self._free) + len(self._cached)

    @property
    def ledger(self) -> Ledger:
        """Counts by state."""
        return Ledger(
            total=self.num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            leased=len(self._users),
            revoked=len(self._revoked),
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # leases

    def allocate(self, count: int) -> list[int]:
        """Leases `count` blocks: those free for longest first, then cached ones, which are not found any more.

        Raises:
            ValueError: fewer than `count` are free or cached, or it is negative; the ledger is unchanged.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(f"{count} blocks were asked for and {self.num_free} are free.")
        block_ids = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        self._users.update(dict.fromkeys(block_ids, 1))
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """One user less for each; blocks that nobody uses any more become cached if they are published, else free.

        The ids are one sequence's blocks in order: later ones are evicted first, since nothing finds them without
        those before.

        Raises:
            ValueError: a block is not leased, or is named twice; the ledger is unchanged.
        """
        self._check(block_ids, self._users, "leased")
        for block_id in block_ids:
            self._users[block_id] -= 1
        unused = [block_id for block_id in block_ids if not self._users[block_id]]
        for block_id in unused:
            del self._users[block_id]
        self._free.extend(block_id for block_id in unused if block_id not in self._hash_of)
        self._cached.update((block_id, None) for block_id in reversed(unused) if block_id in self._hash_of)

    def revoke(self, block_ids: Sequence[int]) -> None:
        """Leased blocks whose lease ended while the sender may still write: out of use until `confirm`.

        Raises:
            ValueError: a block is not leased, is named twice, is published or has several users; the ledger is
                unchanged.
        """
        self._check(block_ids, self._users, "leased")
        shared = [block_id for block_id in block_ids if block_id in self._hash_of or self._users[block_id] > 1]
        if shared:
            raise ValueError(f"Blocks {shared} may be read by others, so nobody can have been writing into them.")
        for block_id in block_ids:
            del self._users[block_id]
        self._revoked.update(block_ids)

    def confirm(self, block_ids: Sequence[int]) -> None:
        """The sender said that it writes no more (or is gone): revoked blocks become free.

        Raises:
            ValueError: a block is not revoked, or is named twice; the ledger is unchanged.
        """
        self._check(block_ids, self._revoked, "revoked")
        self._revoked.difference_update(block_ids)
        self._free.extend(block_ids)

    # prefixes

    def find(self, hashes: Iterable[bytes]) -> Found:
        """Looks for the longest prefix of `hashes` that is published, and leaves everything as it is.

        A `match` that follows takes at most `num_blocks - num_in_use` blocks of those that are free or cached: blocks
        that are only cached may be evicted until then, those in use not.
        """
        num_blocks, num_in_use = 0, 0
        for block_id in self._published(hashes):
            if num_in_use == num_blocks and block_id in self._users:
                num_in_use += 1
            num_blocks += 1
        return Found(num_blocks, num_in_use)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Leases the longest prefix of `hashes` that is published, until each block is released; may be empty."""
        block_ids = list(self._published(hashes))
        for block_id in block_ids:
            self._cached.pop(block_id, None)
            self._users[block_id] = self._users.get(block_id, 0) + 1
        return block_ids

    def publish(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Gives blocks whose KV is whole and final their names, so that `match` finds them; nobody may write any more.

        Where another block has the name already, that one stays the one to be found.

        Raises:
            ValueError: not one name for each, or a block is not leased, is named twice or has another name; nothing is
                changed.
        """
        self._check(block_ids, self._users, "leased")
        if len(block_ids) != len(hashes):
            raise ValueError(f"{len(block_ids)} blocks cannot get {len(hashes)} names.")
        for block_id, name in zip(block_ids, hashes, strict=True):
            if self._hash_of.get(block_id, name) != name:
                raise ValueError(f"Block {block_id} has another name already; what it holds must not change.")
        for block_id, name in zip(block_ids, hashes, strict=True):
            if self._block_of.setdefault(name, block_id) == block_id:
                self._hash_of[block_id] = name

    def forget(self, block_ids: Iterable[int]) -> None:
        """Takes names away, so that `match` does not find these blocks any more; cached ones become free."""
        for block_id in block_ids:
            if (name := self._hash_of.pop(block_id, None)) is None:
                continue
            del self._block_of[name]
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.append(block_id)

    def _published(self, hashes: Iterable[bytes]) -> Iterable[int]:
        for name in hashes:
            if (block_id := self._block_of.get(name)) is None:
                return
            yield block_id

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block_id)]
        return block_id

    @staticmethod
    def _check(block_ids: Sequence[int], state: Container[int], name: str) -> None:
        wrong = [block_id for block_id in block_ids if block_id not in state]
        if wrong or len(set(block_ids)) != len(block_ids):
            raise ValueError(f"Blocks {sorted(wrong) or list(block_ids)} are not {name}, or are named twice.")
