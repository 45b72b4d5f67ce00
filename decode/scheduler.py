"""Which sequences get their next token: all that run, in every step, beside chunks of prompts computed here.

Continuous batching follows Orca (Yu et al., 2022); blocks are leased one by one as sequences grow, and the latest
arrival is preempted and recomputed when they run out, as in vLLM (Kwon et al., 2023). No I/O and no clock.
"""

from bisect import insort
from dataclasses import dataclass

from kvrelay.blocks import BlockManager
from kvrelay.errors import ContextLengthExceeded, MemoryShortage
from kvrelay.messages import Ledger, WorkerLoad
from kvrelay.prefill.scheduler import PrefillScheduler, check_sampled
from kvrelay.prefixes import Prefixes
from kvrelay.types import Batch, FinishReason, RequestKey, ScheduledSequence, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class StepToken:
    """Generated token `index` of one sample; `finish_reason` is set on its last."""

    sequence: Sequence
    sample: int
    index: int
    token_id: int
    finish_reason: FinishReason | None


class DecodeScheduler:
    """Sequences that decode, and the prompts and preempted sequences that are computed (again) in the same steps.

    The earliest arrival is never preempted, so it always progresses; whoever comes later gives its blocks up to whoever
    came before. Blocks under an uncommitted grant can make a sequence sit steps out, never fail.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_queue: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        prefixes: Prefixes | None = None,
    ) -> None:
        """Allocates from `blocks`, which grants use too; `prefixes` of the same blocks, or no cache at all.

        A step computes at most `max_batch_tokens` tokens of at most `max_num_seqs` sequences; at most `max_queue`
        wait; no sequence grows beyond `max_model_len` tokens.

        Raises:
            ValueError: a limit below 1.
            MemoryShortage: all blocks together cannot hold `max_model_len` tokens.
        """
        if blocks.blocks_for(max_model_len) > blocks.num_blocks:
            raise MemoryShortage(
                f"{blocks.num_blocks} blocks of {blocks.block_size} tokens cannot hold one sequence of {max_model_len} "
                "tokens; give more --kv-memory or a smaller --max-model-len."
            )
        self._blocks = blocks
        self._seats = min(max_num_seqs, max_batch_tokens)  # each sequence in a step needs at least one token of it
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._running: list[Sequence] = []  # by arrival
        self.num_preempted = 0
        self._computing: set[Sequence] = set()  # those of _running in the batch that was handed out
        self._prefixes = prefixes or Prefixes(blocks)
        self._prefill = PrefillScheduler(
            blocks,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=self._seats,
            max_queue=max_queue,
            reserve=lambda others: others + len(self._running),
            prefixes=self._prefixes,
        )

    @property
    def has_work(self) -> bool:
        """True while any sequence is here; `schedule` may still find that all must wait for blocks under a grant."""
        return bool(self._running or self._prefill.running or self._prefill.head)

    @property
    def ledger(self) -> Ledger:
        """The blocks of this worker by state."""
        return self._blocks.ledger

    @property
    def load(self) -> WorkerLoad:
        """Sequences by state (preempted ones wait), and the tokens to compute before they can decode."""
        inner = self._prefill.load
        return inner.model_copy(update={"num_running": inner.num_running + len(self._running)})

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose prompt is computed here.

        Raises:
            ContextLengthExceeded: the prompt leaves no room for a token.
            Overloaded: `max_queue` sequences wait already.
        """
        if len(sequence.token_ids) >= self._max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has {len(sequence.token_ids)} tokens and the context {self._max_model_len}, of which one "
                "must be left to generate; shorten the prompt."
            )
        self._prefill.add(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Takes over a sequence whose prompt's KV is in its blocks and whose first token was reported elsewhere.

        If that token ends it, its blocks are freed and its status is FINISHED.

        Raises:
            ValueError: the prompt's KV is not whole, or the first token is missing; the blocks stay the caller's.
        """
        room = len(sequence.block_table) * self._blocks.block_size
        if sequence.num_generated_tokens != 1 or not sequence.num_computed_tokens == sequence.num_prompt_tokens <= room:
            raise ValueError(
                f"{sequence.key.request_id} came with {sequence.num_computed_tokens} of {sequence.num_prompt_tokens} "
                f"prompt tokens computed, blocks for {room} and {sequence.num_generated_tokens} generated tokens; "
                "a hand-over must bring the whole prompt and the first token."
            )
        self._prefill.stamp(sequence)
        self._join(sequence)
        self._finish_reason(sequence)

    def abort(self, key: RequestKey) -> list[Sequence]:
        """Ends every attempt up to `key`, wherever it is, and returns what it ended.

        The blocks of a sequence in the batch that is being computed stay leased until `complete`, since the forward
        may still write into them.
        """
        hit = [item for item in self._running if key.covers(item.key) and item.status is not SequenceStatus.ABORTED]
        for sequence in hit:
            sequence.status = SequenceStatus.ABORTED
            if sequence not in self._computing:
                self._drop(sequence)
        return hit + self._prefill.abort(key)

    def schedule(self) -> Batch:
        """Picks the next step: one token of each running sequence, then chunks of prompts and preempted sequences.

        Every batch but an empty one must come back through `complete` before the next call.

        Raises:
            RuntimeError: the batch handed out before is not complete.
        """
        if self._computing:
            raise RuntimeError("schedule() was called while a batch is computed; call complete() with it first.")
        rows: list[ScheduledSequence] = []
        for sequence in tuple(self._running):
            has_seat = len(rows) + len(self._prefill.running) < self._seats
            # Growing an earlier sequence may have preempted this one.
            if has_seat and sequence.status is SequenceStatus.RUNNING and self._grow(sequence):
                rows.append(ScheduledSequence(sequence, 1))
        chunks = self._prefill.schedule(taken=len(rows))
        self._computing = {item.sequence for item in rows}
        return Batch((*rows, *chunks.scheduled))

    def complete(self, batch: Batch, sampled: list[int | None]) -> list[StepToken]:
        """Takes note that `batch` was computed and returns every new token; sequences that end free their blocks.

        `sampled` has one entry for each scheduled sequence: a token where its `samples` is true, else None. Aborted
        sequences are dropped whatever their entry; so a batch whose forward failed is completed by aborting its
        sequences first and passing None for each.

        Raises:
            ValueError: entries are missing, or one is None where a token is needed; nothing is changed.
        """
        check_sampled(batch, sampled)
        num_rows = len(self._computing)
        rows, chunks = batch.scheduled[:num_rows], Batch(batch.scheduled[num_rows:])
        arrived = self._prefill.complete(chunks, sampled[num_rows:])
        self._computing = set()
        grown = [item.sequence for item, token in zip(rows, sampled[:num_rows], strict=True) if self._note(item, token)]
        for sequence in arrived:
            self._prefill.take(sequence)
            self._join(sequence)
        return [self._step_token(sequence) for sequence in (*grown, *arrived)]

    def grant_allowance(self) -> tuple[int, int]:
        """Blocks and sequences that new grants may take now; the caller subtracts the sequences already granted.

        Nothing while a preempted sequence waits. Else one free block for each running sequence stays, and what the
        next local prompt needs, so that a stream of grants does not starve it.
        """
        head, num_running = self._prefill.head, len(self._running) + len(self._prefill.running)
        if head and head.status is SequenceStatus.PREEMPTED:
            return 0, 0
        wanted = self._blocks.blocks_for(len(head.token_ids)) if head else 0
        blocks = self._blocks.num_free - num_running - wanted
        return max(0, blocks), max(0, self._seats - num_running - self._prefill.load.num_waiting)

    def _grow(self, sequence: Sequence) -> bool:
        """Makes sure that there is a block for the sequence's next token; False when there is none to be had."""
        if sequence.num_computed_tokens < len(sequence.block_table) * self._blocks.block_size:
            return True
        while not self._blocks.num_free:  # one that shares all of its blocks frees none
            if not self._preempt_for(sequence):
                return False
        sequence.block_table += self._blocks.allocate(1)
        return True

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Preempts the latest arrival; False when that is `sequence` itself, which then keeps what it has and waits."""
        latest = max((*self._running, *self._prefill.running), key=_arrival)
        if latest is sequence:
            return False
        if latest in self._running:
            self._running.remove(latest)
        self._prefill.preempt(latest)
        self.num_preempted += 1
        return True

    def _join(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=_arrival)

    def _note(self, item: ScheduledSequence, token: int | None) -> bool:
        """Advances one decoding sequence; False when it was aborted meanwhile."""
        sequence = item.sequence
        if sequence.status is SequenceStatus.ABORTED:
            self._drop(sequence)
            return False
        sequence.num_computed_tokens += item.num_tokens
        self._prefixes.publish(sequence, item.num_tokens)
        if token is None:
            return False
        sequence.token_ids.append(token)
        return True

    def _step_token(self, sequence: Sequence) -> StepToken:
        index, token_id = sequence.num_generated_tokens - 1, sequence.token_ids[-1]
        return StepToken(sequence, sequence.sample, index, token_id, self._finish_reason(sequence))

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Why a running sequence has ended with its last token, if it has; then it is dropped."""
        reason = sequence.finish_reason(self._eos_token_ids, self._max_model_len)
        if reason:
            sequence.status = SequenceStatus.FINISHED
            self._drop(sequence)
        return reason

    def _drop(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._blocks.release(sequence.block_table)
        sequence.block_table = []


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
