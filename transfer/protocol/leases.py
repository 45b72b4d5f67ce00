"""The receiver's leases and their blocks: the one place where blocks of a hand-over change state in the ledger.

  grant                adopt (whole, committed): full blocks are published
──────▶ live ─────────────────────────────────▶ the scheduler's
          │ end, sender can not write any more
          ├────────────────────────────────────▶ free
          │ end, sender writes by itself and may still do so
          └──▶ revoked ──▶ free   (KVReleased, or the sender's observed exit)

Blocks that hold the beginning of the prompt already are shared with others who use them, from the grant on. No sender
may write them, so they are never revoked.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.blocks import BlockManager
from kvrelay.messages import KVOffer, LeaseId, RejectReason
from kvrelay.transfer.protocol.lease import Lease


@dataclass(slots=True)
class Revoked:
    """A lease that ended, but whose blocks the sender may still write to; it is asked again from `ask_at` on."""

    lease: Lease
    reason: RejectReason
    ask_at: float


class Leases:
    """Live leases by counter and by request, revoked ones by counter. A request has at most one live lease."""

    def __init__(self, incarnation: int, blocks: BlockManager) -> None:
        """No lease yet."""
        self._incarnation = incarnation
        self._blocks = blocks
        self._live: dict[int, Lease] = {}
        self._counter_of: dict[str, int] = {}
        self._revoked: dict[int, Revoked] = {}
        self._next_counter = 1

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._live.values()))

    @property
    def num_blocks(self) -> int:
        """Blocks under live leases, granted and not yet adopted, that were nobody's when they were granted."""
        return sum(lease.num_taken for lease in self._live.values())

    @property
    def revoked(self) -> list[Revoked]:
        """Leases that wait for their sender to let go."""
        return list(self._revoked.values())

    def of_request(self, request_id: str) -> Lease | None:
        """The request's live lease."""
        counter = self._counter_of.get(request_id)
        return None if counter is None else self._live[counter]

    def find(self, lease_id: LeaseId) -> Lease | None:
        """The live lease of that name."""
        return self._live.get(lease_id.counter) if lease_id.incarnation == self._incarnation else None

    def shareable(self, offer: KVOffer, block_hashes: list[bytes]) -> list[bytes]:
        """Those of the hashes whose blocks are there and need not be sent: as many as make up whole blocks there."""
        num_found = self._blocks.find(block_hashes).num_blocks
        step = max(1, offer.layout.block_size // self._blocks.block_size)
        return block_hashes[: num_found - num_found % step]

    def grant(self, offer: KVOffer, block_hashes: list[bytes], now: float, *, one_sided: bool) -> Lease:
        """A new lease. The caller has made sure that what is not `shareable` is free.

        `one_sided`: the sender writes into the blocks by itself, so they stay revoked until it lets go.
        """
        lease_id = LeaseId(self._incarnation, self._next_counter)
        self._next_counter += 1
        num_free = self._blocks.num_free
        held = self._blocks.match(self.shareable(offer, block_hashes))
        fresh = self._blocks.allocate(self._blocks.blocks_for(len(offer.prompt_token_ids)) - len(held))
        lease = Lease(
            lease_id,
            offer,
            (*held, *fresh),
            self._blocks.block_size,
            until=now + offer.lease_s,
            one_sided=one_sided,
            held_blocks=len(held),
            block_hashes=block_hashes,
            num_taken=num_free - self._blocks.num_free,
        )
        self._live[lease_id.counter] = lease
        self._counter_of[offer.request_id] = lease_id.counter
        return lease

    def adopt(self, lease: Lease) -> None:
        """The lease is over and its blocks, still leased in the ledger, are the scheduler's and can be found."""
        self._remove(lease)
        fresh = slice(lease.held_blocks, len(lease.block_hashes))
        self._blocks.publish(lease.block_ids[fresh], lease.block_hashes[fresh])

    def end(self, lease: Lease, reason: RejectReason, ask_at: float, *, sender_done: bool = False) -> None:
        """The lease is over without a sequence: its blocks become free, or revoked while the sender may write."""
        self._remove(lease)
        if sender_done or not (lease.one_sided and lease.may_be_written):
            self._blocks.release(lease.block_ids)
            return
        self._blocks.release(lease.block_ids[: lease.held_blocks])
        self._blocks.revoke(lease.block_ids[lease.held_blocks :])
        self._revoked[lease.lease_id.counter] = Revoked(lease, reason, ask_at)

    def confirm(self, lease_id: LeaseId, sender: int) -> bool:
        """The sender lets go of a revoked lease; False if there is none of that name and sender."""
        revoked = self._revoked.get(lease_id.counter)
        if revoked is None or lease_id != revoked.lease.lease_id or sender != revoked.lease.sender:
            return False
        del self._revoked[lease_id.counter]
        self._blocks.confirm(revoked.lease.block_ids[revoked.lease.held_blocks :])
        return True

    def confirm_all(self, sender: int) -> None:
        """The sender is gone, and with it whatever it could still have written."""
        for revoked in self.revoked:
            self.confirm(revoked.lease.lease_id, sender)

    def _remove(self, lease: Lease) -> None:
        del self._live[lease.lease_id.counter]
        del self._counter_of[lease.key.request_id]
