"""What the receiver knows about one lease: its blocks, its clock, and which of them arrived."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

from kvrelay.messages import MAX_REPAIRS, BlockRun, KVCommit, KVGrant, KVOffer, KVRepair, LeaseId
from kvrelay.transfer.protocol.piece import PieceHeader
from kvrelay.types import KVLayout, RequestKey, Sequence, SequenceStatus, TokenLogprobs

# So long a sender must have sent nothing but Commits before what is missing is taken for lost.
_PATIENCE_S = 0.25


class Unfit(StrEnum):
    """Why a piece may not be written."""

    WRONG_LAYOUT = "wrong_layout"
    OUT_OF_RANGE = "out_of_range"
    HELD_BLOCK = "held_block"
    DUPLICATE = "duplicate"


class Place(NamedTuple):
    """Where a piece goes: its first token is token `offset` of the first of these blocks of the receiver.

    `is_end`: the prompt ends with it, so that nothing follows in the last block.
    """

    block_ids: tuple[int, ...]
    offset: int = 0
    is_end: bool = False


@dataclass(slots=True)
class Lease:
    """Blocks of `block_size` tokens reserved for one attempt until `until` (receiver's clock).

    Bit i of a mask is block i of the sequence as the sender counts, whose blocks may be of another size. The first
    `held_blocks` are shared with others and may not be written. `block_hashes` names the full blocks. `num_taken`
    blocks were free or cached before. `repairs` are runs that the sender was asked to send again, of which it says to
    have sent `num_repaired`.
    """

    lease_id: LeaseId
    offer: KVOffer
    block_ids: tuple[int, ...]
    block_size: int
    until: float
    one_sided: bool = False  # the sender may write into the blocks by itself
    held_blocks: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_taken: int = 0
    first_token_ids: tuple[int, ...] = ()  # known once the Commit is here
    first_logprobs: tuple[TokenLogprobs, ...] = ()  # and so are these, if they are asked for
    cached_tokens: int = 0  # and this
    accepted: list[int] = field(default_factory=list)  # per layer
    landed: list[int] = field(default_factory=list)  # per layer
    begun_at: float = inf  # when the first piece had landed, receiver's clock
    asked: list[int] = field(default_factory=list)  # per layer, all of `repairs`
    repairs: list[BlockRun] = field(default_factory=list)
    num_damaged: int = 0  # of them
    num_repaired: int = 0
    num_shown: int = -1  # pieces of this sender, when the newest Commit came
    committed_at: float = inf  # since when Commits come and nothing else does, receiver's clock

    def __post_init__(self) -> None:
        held = (1 << self.num_held) - 1
        self.accepted = [held] * self.offer.layout.num_layers
        self.landed = list(self.accepted)
        self.asked = [0] * self.offer.layout.num_layers

    @property
    def key(self) -> RequestKey:
        """The attempt it was granted to."""
        return self.offer.key

    @property
    def sender(self) -> int:
        """The only incarnation that may write under it."""
        return self.offer.source

    @property
    def num_sent(self) -> int:
        """Blocks of the prompt as the sender counts, those among them that need not be sent too."""
        return self.offer.layout.num_blocks(len(self.offer.prompt_token_ids))

    @property
    def num_held(self) -> int:
        """Leading blocks, as the sender counts, that are there already."""
        return self.held_blocks * self.block_size // self.offer.layout.block_size

    @property
    def is_committed(self) -> bool:
        """True when the sender has left the attempt's fate to this end."""
        return bool(self.first_token_ids)

    @property
    def may_be_written(self) -> bool:
        """False from the sender's word that it writes no more, until it is asked to send something again."""
        return not self.is_committed or self.num_repaired < len(self.repairs)

    @property
    def is_whole(self) -> bool:
        """True when every block of every layer landed intact."""
        everything = (1 << self.num_sent) - 1
        return all(mask == everything for mask in self.landed)

    def objection(self, header: PieceHeader) -> Unfit | None:
        """Why this piece may not be written under the lease, or None."""
        layout = self.offer.layout
        if not _matches(header, layout):
            return Unfit.WRONG_LAYOUT
        if header.layers.stop > layout.num_layers or header.first_block + header.num_blocks > self.num_sent:
            return Unfit.OUT_OF_RANGE
        if header.first_block < self.num_held:
            return Unfit.HELD_BLOCK
        is_known = any(self.accepted[layer] & header.block_mask for layer in header.layers)
        return Unfit.DUPLICATE if is_known else None

    def accept(self, header: PieceHeader) -> Place:
        """Marks the piece as on its way into memory."""
        for layer in header.layers:
            self.accepted[layer] |= header.block_mask
        end = header.first_block + header.num_blocks
        first, offset = divmod(header.first_block * header.block_size, self.block_size)
        past = -(-end * header.block_size // self.block_size)
        return Place(self.block_ids[first:past], offset, is_end=end == self.num_sent)

    def land(self, header: PieceHeader, now: float) -> None:
        """Marks an accepted piece as written and verified; one that was not accepted changes nothing."""
        self.begun_at = min(self.begun_at, now)
        for layer in header.layers:
            self.landed[layer] |= header.block_mask & self.accepted[layer]

    def ask_again(self, runs: list[BlockRun]) -> bool:
        """These blocks must come once more. False: one of them was asked for before, or they are too many in all."""
        masks = [(run.layer, ((1 << run.num_blocks) - 1) << run.first_block) for run in runs]
        if len(self.repairs) + len(runs) > MAX_REPAIRS or any(self.asked[layer] & mask for layer, mask in masks):
            return False
        for layer, mask in masks:
            self.asked[layer] |= mask
            self.accepted[layer] &= ~mask
        self.repairs += runs
        return True

    def fault_of(self, commit: KVCommit) -> str:
        """What is wrong with the first tokens of a Commit, as a sentence; empty if nothing is."""
        if len(commit.first_token_ids) != self.offer.num_samples:
            return "The commit does not hold one token for each sample."
        num_logprobs = 0 if self.offer.params.logprobs is None else self.offer.num_samples
        if len(commit.first_logprobs) != num_logprobs:
            return "The commit does not hold the logprobs that the request asks for."
        return ""

    def note_first_tokens(self, commit: KVCommit) -> None:
        """The attempt's fate is this end's from now on, and so is telling these again."""
        self.first_token_ids, self.first_logprobs = commit.first_token_ids, commit.first_logprobs
        self.cached_tokens = commit.cached_tokens

    def commit(self, num_repaired: int, num_shown: int, now: float) -> None:
        """The sender says, again and again, that all was sent. If nothing comes meanwhile, asks for what is missing.

        `num_shown` counts what came from this sender under any lease: one piece may wait behind others.
        """
        news = (min(num_repaired, len(self.repairs)), num_shown)
        stalled = news == (self.num_repaired, self.num_shown) and now - self.committed_at >= _PATIENCE_S
        if news != (self.num_repaired, self.num_shown):
            self.committed_at = now
        self.num_repaired, self.num_shown = max(self.num_repaired, news[0]), num_shown
        if stalled and not self.may_be_written:
            self.ask_again(self._missing()[: MAX_REPAIRS - len(self.repairs)])

    def _missing(self) -> list[BlockRun]:
        everything = (1 << self.num_sent) - 1
        masks = [everything & ~landed & ~asked for landed, asked in zip(self.landed, self.asked, strict=True)]
        return [BlockRun(layer, *run) for layer, mask in enumerate(masks) for run in runs_of(mask)]

    def repair(self, incarnation: int) -> KVRepair:
        """Asks for everything that has to come again; there must be something."""
        return KVRepair(
            source=incarnation,
            target=self.sender,
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            lease_id=self.lease_id,
            runs=tuple(self.repairs),
            num_damaged=self.num_damaged,
        )

    def grant(self, incarnation: int) -> KVGrant:
        """The Grant; the same one however often it is asked for."""
        return KVGrant(
            source=incarnation,
            target=self.sender,
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            lease_id=self.lease_id,
            block_ids=self.block_ids,
            block_size=self.block_size,
            held_blocks=self.held_blocks,
            one_sided=self.one_sided,
        )

    def sequence(self) -> Sequence:
        """The sequence that decoding starts from: the prompt's KV is there, the first token's is not."""
        num_prompt_tokens = len(self.offer.prompt_token_ids)
        return Sequence(
            key=self.key,
            sample=0,
            gateway=self.offer.gateway,
            params=self.offer.params,
            token_ids=[*self.offer.prompt_token_ids, *self.first_token_ids],
            num_prompt_tokens=num_prompt_tokens,
            block_table=list(self.block_ids),
            num_computed_tokens=num_prompt_tokens,
            status=SequenceStatus.RUNNING,
            cache_salt=self.offer.cache_salt,
            block_hashes=self.block_hashes,
            num_cached_tokens=self.cached_tokens,
            logprobs=self.first_logprobs[0] if self.first_logprobs else None,
        )


def _matches(header: PieceHeader, layout: KVLayout) -> bool:
    return (header.head_start, header.num_heads, header.row_bytes, header.block_size, header.dtype) == (
        0,
        layout.num_kv_heads,
        layout.row_bytes,
        layout.block_size,
        layout.dtype,
    )


def runs_of(mask: int) -> list[tuple[int, int]]:
    """Begin and length of each run of ones, lowest first."""
    runs, begin = [], 0
    while mask:
        zeros = (mask & -mask).bit_length() - 1
        mask >>= zeros
        ones = (~mask & (mask + 1)).bit_length() - 1
        mask >>= ones
        runs.append((begin + zeros, ones))
        begin += zeros + ones
    return runs
