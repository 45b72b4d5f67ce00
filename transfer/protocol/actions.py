"""What the two state machines ask their worker to do, in this order.

A worker does the actions of a list one after the other. When a transport would block on a `SendPiece`, it keeps that
action and those behind it, and asks for no further pieces before they are through: nothing may be written after the
`KVCommit` that follows them.
"""

from dataclasses import dataclass

from kvrelay.messages import AnyMessage, Peer
from kvrelay.transfer.protocol.piece import PieceHeader
from kvrelay.types import RequestKey, Sequence


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message: to a Peer that may have to be connected first, or to an incarnation we heard from."""

    peer: Peer | int
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class SendPiece:
    """Read the local blocks of the layers, seal the header (its digest is still 0) and give both to the transport.

    `block_ids` are the sender's blocks to read; `target_block_ids` the receiver's, for transports that write there
    by themselves, which they may only if the grant was `one_sided`. There are none where blocks are of another size.
    """

    peer: Peer
    header: PieceHeader
    block_ids: tuple[int, ...]
    target_block_ids: tuple[int, ...]
    one_sided: bool


@dataclass(frozen=True, slots=True)
class FirstTokenDue:
    """Sender: the first tokens are known and a grant is held, so they may go to the gateway. Comes once."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Sender: the receiver has the KV whole and intact; the blocks may be freed."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt is over: tell the gateway RequestFailed. From a sender only before its KVCommit; free the blocks.

    A receiver has already freed its own.
    """

    key: RequestKey
    gateway: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Sender: the attempt is over and somebody else tells its fate (receiver or gateway); free the blocks silently."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Adopt:
    """Receiver: the KV is whole and intact. The sequence, and with it the blocks of its table, is the scheduler's.

    The worker tells the gateway DecodeStarted. `peer` is the sender's incarnation; the KV began to come at `begun_at`,
    in seconds of the receiver's clock.
    """

    sequence: Sequence
    peer: int
    begun_at: float


@dataclass(frozen=True, slots=True)
class DropSequence:
    """Receiver: every attempt up to `key` that was adopted is to stop and to free its blocks.

    The receiver forgets adopted sequences after one maximum lease, so the key may name one that finished or never
    came; then there is nothing to do.
    """

    key: RequestKey


Action = Send | SendPiece | FirstTokenDue | HandedOver | Failed | Dropped | Adopt | DropSequence
