"""The block ledger: nothing lost, nothing twice, whatever the order of calls."""

from itertools import chain

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.blocks import BlockManager


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


class LedgerMachine(RuleBasedStateMachine):
    """Leases of random size are released or revoked and confirmed in any order."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.NUM_BLOCKS, 4)
        self.leases: list[list[int]] = []
        self.revoked: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        if count <= self.blocks.num_free:
            self.leases.append(self.blocks.allocate(count))
        else:
            with pytest.raises(ValueError, match="asked for"):
                self.blocks.allocate(count)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.blocks.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.blocks.revoke(lease)
        self.revoked.append(lease)

    @precondition(lambda self: self.revoked)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        self.blocks.confirm(self.revoked.pop(data.draw(st.integers(0, len(self.revoked) - 1))))

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        leased, revoked = list(chain(*self.leases)), list(chain(*self.revoked))
        ledger = self.blocks.ledger
        assert ledger.conserved
        assert len({*leased, *revoked}) == len(leased) + len(revoked)
        assert (ledger.total, ledger.leased, ledger.revoked) == (self.NUM_BLOCKS, len(leased), len(revoked))


TestLedger = LedgerMachine.TestCase
