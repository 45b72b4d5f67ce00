"""The block ledger: nothing lost, nothing twice, whatever the order of calls."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.blocks import BlockManager
from kvrelay.messages import Ledger


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 16)])
def test_a_ledger_without_blocks_or_tokens_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least one block of one token"):
        BlockManager(num_blocks, block_size)


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_for_rounds_up(num_tokens: int, expected: int) -> None:
    assert BlockManager(1, 16).blocks_for(num_tokens) == expected


def test_blocks_free_for_longest_go_first() -> None:
    blocks = BlockManager(4, 16)
    first = blocks.allocate(3)
    blocks.release([first[1]])
    blocks.release([first[0]])
    assert blocks.allocate(3) == [3, first[1], first[0]]


@pytest.mark.parametrize("count", [3, -1])
def test_an_impossible_allocation_changes_nothing(count: int) -> None:
    blocks = BlockManager(2, 16)
    with pytest.raises(ValueError, match="asked for"):
        blocks.allocate(count)
    assert blocks.num_free == 2


@pytest.mark.parametrize("give_back", ["release", "revoke"])
@pytest.mark.parametrize("wrong", [[0, 0], [1, 3], [-1], [99]])
def test_giving_back_what_is_not_leased_changes_nothing(give_back: str, wrong: list[int]) -> None:
    blocks = BlockManager(4, 16)
    blocks.allocate(2)
    before = blocks.ledger
    with pytest.raises(ValueError, match="not leased, or are named twice"):
        getattr(blocks, give_back)(wrong)
    assert blocks.ledger == before


def test_revoked_blocks_stay_out_of_use_until_the_sender_confirms() -> None:
    blocks = BlockManager(2, 16)
    leased = blocks.allocate(2)
    blocks.revoke(leased)
    assert blocks.num_free == 0
    with pytest.raises(ValueError, match="not leased"):
        blocks.release(leased)
    with pytest.raises(ValueError, match="not revoked, or are named twice"):
        blocks.confirm([leased[0], leased[0]])
    blocks.confirm(leased)
    assert blocks.num_free == 2


def test_a_ledger_tells_that_a_block_is_lost_or_counted_twice() -> None:
    assert Ledger(total=4, free=1, cached=1, leased=1, revoked=1).conserved
    for leased in (0, 2):
        assert not Ledger(total=4, free=1, cached=1, leased=leased, revoked=1).conserved


NAMES = [bytes([65 + index]) for index in range(6)]


def published(blocks: BlockManager, *names: bytes) -> list[int]:
    """Cached blocks with these names, as one sequence leaves them behind."""
    block_ids = blocks.allocate(len(names))
    blocks.publish(block_ids, names)
    blocks.release(block_ids)
    return block_ids


def test_published_blocks_are_found_up_to_the_first_that_is_missing() -> None:
    blocks = BlockManager(8, 16)
    cached = published(blocks, *NAMES[:3])
    assert blocks.find(NAMES) == (3, 0)
    assert blocks.match([NAMES[0], NAMES[5], NAMES[1]]) == cached[:1]
    assert blocks.match(NAMES) == cached
    assert (blocks.ledger.cached, blocks.ledger.leased) == (0, 3)


def test_in_use_wins_over_cached_and_a_shared_block_counts_once() -> None:
    blocks = BlockManager(4, 16)
    cached = published(blocks, *NAMES[:2])
    first, second = blocks.match(NAMES[:2]), blocks.match(NAMES[:2])
    assert first == second == cached
    assert blocks.find(NAMES) == (2, 2)
    assert (blocks.ledger.free, blocks.ledger.cached, blocks.ledger.leased) == (2, 0, 2)
    blocks.release(first)
    assert (blocks.ledger.cached, blocks.ledger.leased) == (0, 2)
    blocks.release(second)
    assert (blocks.ledger.cached, blocks.ledger.leased) == (2, 0)


def test_free_blocks_go_before_cached_ones_and_those_unused_for_longest_before_others() -> None:
    blocks = BlockManager(5, 16)
    old, new = published(blocks, *NAMES[:2]), published(blocks, *NAMES[2:4])
    blocks.release(blocks.match(NAMES[:2]))  # used again, so it is the newer one now
    assert blocks.num_free == 5
    assert blocks.allocate(5) == [4, new[1], new[0], old[1], old[0]]  # children before their parents


def test_prefix_hits_while_the_block_is_being_evicted() -> None:
    """A prefix hit and an eviction at the same time: a block that was matched is never handed out again."""
    blocks = BlockManager(3, 16)
    cached = published(blocks, *NAMES[:3])
    pinned = blocks.match(NAMES[:2])
    assert blocks.allocate(1) == cached[2:]
    with pytest.raises(ValueError, match="1 blocks were asked for and 0 are free"):
        blocks.allocate(1)
    assert blocks.match(NAMES) == pinned  # the third is not found any more
    blocks.release(pinned)
    blocks.release(pinned)
    assert blocks.allocate(2) == [pinned[1], pinned[0]]
    assert blocks.match(NAMES) == []


def test_a_twin_of_a_published_block_stays_its_sequences_own() -> None:
    blocks = BlockManager(2, 16)
    first, twin = blocks.allocate(1), blocks.allocate(1)
    blocks.publish(first, NAMES[:1])
    blocks.publish(twin, NAMES[:1])
    blocks.publish(first, NAMES[:1])  # again: nothing changes
    assert blocks.match(NAMES) == first
    blocks.release(twin)
    assert (blocks.ledger.free, blocks.ledger.cached) == (1, 0)


def test_only_blocks_in_use_are_sure_to_be_there_later() -> None:
    """A twin's child can be in use while the block before it is only cached, and so may be evicted."""
    blocks = BlockManager(3, 16)
    parent, (twin, child) = blocks.allocate(1), blocks.allocate(2)
    blocks.publish(parent, NAMES[:1])
    blocks.publish([twin, child], NAMES[:2])
    assert blocks.find(NAMES) == (2, 2)
    blocks.release(parent)
    assert blocks.find(NAMES) == (2, 0)
    assert blocks.allocate(1) == parent
    assert blocks.match(NAMES) == []


def test_a_published_block_keeps_its_name_and_nothing_else_is_published() -> None:
    blocks = BlockManager(4, 16)
    leased = blocks.allocate(2)
    with pytest.raises(ValueError, match="not leased"):
        blocks.publish([leased[0], 3], NAMES[:2])
    with pytest.raises(ValueError, match="2 blocks cannot get 1 names"):
        blocks.publish(leased, NAMES[:1])
    assert blocks.find(NAMES) == (0, 0)
    blocks.publish(leased[:1], NAMES[:1])
    with pytest.raises(ValueError, match="another name already"):
        blocks.publish(leased, NAMES[1:3])
    assert blocks.find(NAMES[1:]) == (0, 0)


def test_what_others_may_read_is_never_revoked() -> None:
    """A revoked block is one that a sender may still write into."""
    blocks = BlockManager(4, 16)
    leased = blocks.allocate(1)
    blocks.publish(leased, NAMES[:1])
    with pytest.raises(ValueError, match="may be read by others"):
        blocks.revoke(leased)
    blocks.match(NAMES)
    blocks.forget(leased)
    with pytest.raises(ValueError, match="may be read by others"):
        blocks.revoke(leased)
    assert blocks.ledger.leased == 1


def test_forgotten_blocks_are_found_no_more_and_are_free_when_nobody_uses_them() -> None:
    blocks = BlockManager(4, 16)
    cached = published(blocks, *NAMES[:2])
    used = blocks.match(NAMES[:1])
    blocks.forget([*cached, 3])
    assert blocks.find(NAMES) == (0, 0)
    assert (blocks.ledger.free, blocks.ledger.cached, blocks.ledger.leased) == (3, 0, 1)
    blocks.release(used)
    assert blocks.ledger.free == 4


class LedgerMachine(RuleBasedStateMachine):
    """Chains of blocks are matched, allocated, published, released, revoked and confirmed in any order.

    `content` is what the blocks of a lease hold: the tokens from the start of its chain to the block's end.
    """

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.NUM_BLOCKS, 4)
        self.leases: list[tuple[bytes, list[int]]] = []
        self.revoked: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @staticmethod
    def names(chain_of: bytes) -> list[bytes]:
        return [chain_of[: end + 1] for end in range(len(chain_of))]

    @rule(chain_of=st.text("ab", max_size=NUM_BLOCKS + 1).map(str.encode))
    def begin(self, chain_of: bytes) -> None:
        """A sequence starts: blocks that hold its beginning, and new ones for the rest."""
        found = self.blocks.find(self.names(chain_of))
        room = self.blocks.num_free >= len(chain_of) - found.num_in_use
        matched = self.blocks.match(self.names(chain_of))
        assert len(matched) == found.num_blocks
        assert [self.content[block_id] for block_id in matched] == self.names(chain_of)[: len(matched)]
        missing = len(chain_of) - len(matched)
        assert missing <= self.blocks.num_free or not room
        if missing > self.blocks.num_free:
            with pytest.raises(ValueError, match="asked for"):
                self.blocks.allocate(missing)
            self.blocks.release(matched)
            return
        fresh = self.blocks.allocate(missing)
        assert set(fresh).isdisjoint(chain(*self.revoked, matched, *(block_ids for _, block_ids in self.leases)))
        self.content |= dict.fromkeys(fresh, b"nothing yet")
        self.leases.append((chain_of, matched + fresh))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A sequence writes its blocks and publishes some of them."""
        chain_of, block_ids = data.draw(st.sampled_from(self.leases))
        end = data.draw(st.integers(0, len(block_ids)))
        for block_id, content in zip(block_ids[:end], self.names(chain_of), strict=False):
            assert self.content[block_id] in (b"nothing yet", content)
            self.content[block_id] = content
        self.blocks.publish(block_ids[:end], self.names(chain_of)[:end])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, block_ids = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.blocks.release(block_ids)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        """Only blocks that nobody else can read are ever revoked; the others are released."""
        _, block_ids = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        users = Counter(chain(block_ids, *(others for _, others in self.leases)))
        unread = [each for each in block_ids if self.content[each] == b"nothing yet" and users[each] == 1]
        self.blocks.release([each for each in block_ids if each not in unread])
        self.blocks.revoke(unread)
        self.revoked.append(unread)

    @precondition(lambda self: self.revoked)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        self.blocks.confirm(self.revoked.pop(data.draw(st.integers(0, len(self.revoked) - 1))))

    @rule(block_ids=st.sets(st.integers(0, NUM_BLOCKS - 1)))
    def forget(self, block_ids: set[int]) -> None:
        self.blocks.forget(block_ids)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        leased, revoked = set(chain(*(block_ids for _, block_ids in self.leases))), list(chain(*self.revoked))
        ledger = self.blocks.ledger
        assert ledger.conserved
        assert leased.isdisjoint(revoked)
        assert (ledger.total, ledger.leased, ledger.revoked) == (self.NUM_BLOCKS, len(leased), len(revoked))
        assert ledger.free + ledger.cached == self.blocks.num_free

    def teardown(self) -> None:
        """What is cached is found, and nothing else is left."""
        while self.leases:
            self.blocks.release(self.leases.pop()[1])
        for block_ids in self.revoked:
            self.blocks.confirm(block_ids)
        assert self.blocks.ledger.leased == self.blocks.ledger.revoked == 0
        assert len(self.blocks.allocate(self.NUM_BLOCKS)) == self.NUM_BLOCKS


TestLedger = LedgerMachine.TestCase
