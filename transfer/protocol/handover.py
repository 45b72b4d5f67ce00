"""What the sender knows about one attempt: where it stands, what was computed and what was sent."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from math import inf

from kvrelay.messages import BlockRun, KVCommit, KVGrant, KVOffer, Peer, RefusalReason
from kvrelay.transfer.protocol.actions import SendPiece
from kvrelay.transfer.protocol.piece import PieceHeader
from kvrelay.types import KVLayout, RequestKey, Sequence


class Phase(StrEnum):
    """The picture is at the top of sender.py."""

    OFFERED = "offered"
    GRANTED = "granted"
    COMMITTED = "committed"


@dataclass(slots=True)
class Handover:
    """One attempt on its way to `peer`. `written` and `sent` count leading blocks of the prompt, per layer."""

    sequence: Sequence
    num_samples: int
    num_blocks: int
    peer: Peer
    candidates: deque[Peer]  # not asked yet
    deadline: float
    written: list[int]
    sent: list[int]
    num_unsent: int = 0  # written and not sent, of all layers
    first_layer: int = 0  # none before it has any such
    asked_at: float = 0.0  # when this peer was offered it first
    begun_at: float = inf  # when the first piece went
    phase: Phase = Phase.OFFERED
    grant: KVGrant | None = None  # the lease held, from GRANTED on
    block_ids: tuple[int, ...] = ()  # local blocks, fixed when the first layer is written
    first_token_ids: tuple[int, ...] = ()  # known once the whole prompt is computed
    first_token_told: bool = False
    num_asked: int = 0  # runs that the receiver wants once more under this lease
    num_damaged: int = 0  # of them
    repairs: deque[BlockRun] = field(default_factory=deque)  # those of them that are not sent yet
    commit_again: bool = False  # when those are sent
    resend_at: float = 0.0
    num_sends: int = 0  # of the Offer or Commit being repeated
    refusals: list[tuple[RefusalReason | None, str]] = field(default_factory=list)  # None: the candidate was lost

    @property
    def key(self) -> RequestKey:
        """The attempt."""
        return self.sequence.key

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return tuple(self.sequence.token_ids[: self.sequence.num_prompt_tokens])

    @property
    def num_unsent_blocks(self) -> int:
        """Blocks, counted per layer, that are written and may go under the lease held, or once more."""
        if self.phase is Phase.OFFERED:
            return 0
        return sum(run.num_blocks for run in self.repairs) + self.num_unsent

    @property
    def is_through(self) -> bool:
        """True when the prompt is computed, a lease is held and no piece is left to send: the commit is due."""
        due = self.commit_again or (self.phase is Phase.GRANTED and bool(self.first_token_ids))
        return due and min(self.sent) == self.num_blocks and not self.repairs

    def note_written(self, layer: int, num_blocks: int) -> None:
        """The layer's leading blocks are final.

        Raises:
            ValueError: the sequence's block table does not hold the whole prompt.
        """
        if not self.block_ids:
            self.block_ids = tuple(self.sequence.block_table[: self.num_blocks])
            if len(self.block_ids) != self.num_blocks:
                raise ValueError(
                    f"{self.key} has {len(self.block_ids)} of {self.num_blocks} blocks; "
                    "a whole prompt is reserved before its first chunk."
                )
        num_unsent = self._num_unsent_of(layer)
        self.written[layer] = max(self.written[layer], min(num_blocks, self.num_blocks))
        self.num_unsent += self._num_unsent_of(layer) - num_unsent
        self.first_layer = min(self.first_layer, layer)

    def hold(self, grant: KVGrant, block_size: int) -> None:
        """Every layer starts anew under this lease, behind the blocks that the receiver has already.

        `block_size` is ours.
        """
        self.phase, self.grant = Phase.GRANTED, grant
        self.sent = [grant.held_blocks * grant.block_size // block_size] * len(self.sent)
        self.num_unsent = sum(map(self._num_unsent_of, range(len(self.sent))))
        self.first_layer = 0
        self.repairs.clear()
        self.num_asked, self.num_damaged, self.commit_again = 0, 0, False

    def repair(self, runs: tuple[BlockRun, ...]) -> bool:
        """The receiver wants `runs` once more; those it named before are known. False: there are no such blocks.

        What was not sent at all will be, so it need not be sent again.
        """
        if any(run.layer >= len(self.sent) or run.first_block + run.num_blocks > self.num_blocks for run in runs):
            return False
        news = runs[self.num_asked :]
        self.num_asked += len(news)
        counts = [min(run.num_blocks, self.sent[run.layer] - run.first_block) for run in news]
        self.repairs += [run._replace(num_blocks=count) for run, count in zip(news, counts, strict=True) if count > 0]
        self.commit_again = self.commit_again or (bool(news) and self.phase is Phase.COMMITTED)
        return True

    def next_piece(self, incarnation: int, layout: KVLayout, max_blocks: int) -> SendPiece | None:
        """Takes the next run of unsent blocks: those to repair, then lowest layer first; None if there is none.

        It goes through as many layers as have the same blocks to send; `max_blocks` counts those of all layers.
        """
        if self.repairs and self.grant is not None:
            layer, first, num_blocks = self.repairs.popleft()
            count = min(num_blocks, max_blocks)
            if count < num_blocks:
                self.repairs.appendleft(BlockRun(layer, first + count, num_blocks - count))
            return self._piece(self.grant, incarnation, layout, range(layer, layer + 1), first, count)
        while self.first_layer < len(self.sent) and self.grant is not None:
            layer, first = self.first_layer, self.sent[self.first_layer]
            if count := min(self._num_unsent_of(layer), max_blocks):
                layers = self._alike(layer, max_blocks // count)
                for each in layers:
                    self.sent[each] += count
                self.num_unsent -= count * len(layers)
                return self._piece(self.grant, incarnation, layout, layers, first, count)
            self.first_layer += 1
        return None

    def _num_unsent_of(self, layer: int) -> int:
        return max(0, self.written[layer] - self.sent[layer])

    def _alike(self, layer: int, most: int) -> range:
        """Layers from this one on that have just the same blocks to send."""
        last = min(layer + most, len(self.sent))
        run = (self.sent[layer], self.written[layer])
        alike = takewhile(lambda each: (self.sent[each], self.written[each]) == run, range(layer, last))
        return range(layer, layer + sum(1 for _ in alike))

    def _piece(
        self, grant: KVGrant, incarnation: int, layout: KVLayout, layers: range, first: int, count: int
    ) -> SendPiece:
        header = PieceHeader(
            lease_id=grant.lease_id,
            sender=incarnation,
            layer=layers.start,
            first_block=first,
            num_blocks=count,
            head_start=0,
            num_heads=layout.num_kv_heads,
            block_size=layout.block_size,
            dtype=layout.dtype,
            payload_bytes=len(layers) * count * layout.block_bytes,
            num_layers=len(layers),
        )
        run = slice(first, first + count)
        targets = grant.block_ids[run] if grant.block_size == layout.block_size else ()
        return SendPiece(self.peer, header, self.block_ids[run], targets, grant.one_sided)

    def offer(self, incarnation: int, fingerprint: str, layout: KVLayout, lease_s: float) -> KVOffer:
        """The Offer to the current candidate; the same one however often it is sent."""
        return KVOffer(
            source=incarnation,
            target=self.peer.incarnation,
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            prompt_token_ids=self.prompt,
            params=self.sequence.params,
            num_samples=self.num_samples,
            cache_salt=self.sequence.cache_salt,
            gateway=self.sequence.gateway,
            fingerprint=fingerprint,
            layout=layout,
            lease_s=lease_s,
        )

    def commit(self, incarnation: int, grant: KVGrant) -> KVCommit:
        """The Commit under the lease held."""
        return KVCommit(
            source=incarnation,
            target=self.peer.incarnation,
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            lease_id=grant.lease_id,
            first_token_ids=self.first_token_ids,
            num_repaired=self.num_asked if not self.repairs else 0,
            cached_tokens=self.sequence.num_cached_tokens,
            first_logprobs=() if self.sequence.logprobs is None else (self.sequence.logprobs,),
        )
