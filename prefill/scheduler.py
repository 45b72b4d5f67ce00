"""Which prompt tokens are computed next: those of the shortest prompts, in chunks that share one token budget.

Chunked prefill under a token budget follows Sarathi-Serve (Agrawal et al., 2024), the block tables PagedAttention
(Kwon et al., 2023), the order shortest remaining processing time (Schrage, 1968), with a share of each step for the
oldest. The scheduler does no I/O and has no clock: a worker, a test or the planner drives it.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import chain

from kvrelay.blocks import BlockManager
from kvrelay.errors import ContextLengthExceeded, Overloaded
from kvrelay.messages import Ledger, WorkerLoad
from kvrelay.prefixes import Prefixes
from kvrelay.types import Batch, RequestKey, ScheduledSequence, Sequence, SequenceStatus

OLDEST_SHARE = 4  # the oldest has at least one in so many of a step's tokens


class PrefillScheduler:
    """Prompts that wait, run (a part is computed) or are held (computed, and kept until someone else has their KV).

    A sequence gets the blocks of all its tokens before its first chunk, so one that runs never lacks a block. A prompt
    starts before an earlier one only where both would fit: so tokens go to short prompts first, and blocks still go to
    whoever came first. Blocks that hold its beginning already are shared with whoever uses them, and only the rest is
    computed.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
        max_queue: int,
        reserve: Callable[[int], int] | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """Allocates from `blocks`, which others may use too; `prefixes` of the same blocks, or no cache at all.

        A step computes at most `max_batch_tokens` tokens of at most `max_num_seqs` sequences; at most `max_queue`
        wait. `reserve(n)` is the number of blocks that must stay free when one more sequence starts beside `n` that
        run or are held here. Without it, that is half of all blocks (none when n is 0): so sequences that are held,
        or soon will be, have at most half of the blocks, except for one alone, which may have them all.

        Raises:
            ValueError: a limit below 1.
        """
        if min(max_batch_tokens, max_num_seqs, max_queue) < 1:
            raise ValueError(
                "max_batch_tokens, max_num_seqs and max_queue must be 1 or more, "
                f"not {max_batch_tokens}, {max_num_seqs} and {max_queue}."
            )
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._reserve = reserve or _half_of(blocks.num_blocks)
        self._prefixes = prefixes or Prefixes(blocks)
        self._num_arrived = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._held: list[Sequence] = []
        self._computing: dict[Sequence, int] = {}  # tokens of each sequence in the batch that was handed out
        self._offered: set[Sequence] = set()

    @property
    def ledger(self) -> Ledger:
        """The blocks of this worker by state."""
        return self._blocks.ledger

    @property
    def load(self) -> WorkerLoad:
        """Sequences by state, and the tokens that are still to be computed."""
        return WorkerLoad(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_held=len(self._held),
            num_waiting_tokens=sum(sequence.num_uncomputed_tokens for sequence in (*self._waiting, *self._running)),
        )

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that have blocks but are not computed to their end."""
        return tuple(self._running)

    @property
    def head(self) -> Sequence | None:
        """The first of those that wait: nobody starts unless it would fit."""
        return self._waiting[0] if self._waiting else None

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence none of whose tokens is computed.

        Raises:
            ContextLengthExceeded: it would not fit if it had all blocks.
            Overloaded: `max_queue` sequences wait already.
        """
        if self._need(sequence) > self._blocks.num_blocks:
            most = self._blocks.num_blocks * self._blocks.block_size
            raise ContextLengthExceeded(
                f"The prompt has {len(sequence.token_ids)} tokens and this worker can hold {most}; shorten the prompt."
            )
        if len(self._waiting) >= self._max_queue:
            raise Overloaded(f"{len(self._waiting)} requests wait at this worker, the most it queues; try again later.")
        self.stamp(sequence)
        self._waiting.append(sequence)

    def stamp(self, sequence: Sequence) -> None:
        """Numbers a sequence as this worker's latest arrival."""
        self._num_arrived += 1
        sequence.arrival = self._num_arrived

    def abort(self, key: RequestKey) -> list[Sequence]:
        """Ends every attempt up to `key` and returns what it ended; those held lose their blocks too.

        The blocks of a sequence in the batch that is being computed stay leased until `complete`, since the forward
        may still write into them.
        """
        everyone = (*self._waiting, *self._running, *self._held)
        ended = [item for item in everyone if key.covers(item.key) and item.status is not SequenceStatus.ABORTED]
        for sequence in ended:
            sequence.status = SequenceStatus.ABORTED
            if sequence not in self._computing:
                self._forget(sequence)
        return ended

    def schedule(self, taken: int = 0) -> Batch:
        """Picks the chunks of the next step and leases blocks to the sequences that start with it.

        `taken` tokens of as many other sequences (decoding, one each) are in the same step and count against its
        limits. Every batch but an empty one must come back through `complete` before the next call.

        Raises:
            RuntimeError: the batch handed out before is not complete.
        """
        if self._computing:
            raise RuntimeError("schedule() was called while a batch is computed; call complete() with it first.")
        plan = self._plan(taken)
        for sequence in plan:
            if sequence.status is not SequenceStatus.RUNNING:
                self._start(sequence)
        self._computing = plan
        return Batch(tuple(ScheduledSequence(sequence, num_tokens) for sequence, num_tokens in plan.items()))

    def complete(self, batch: Batch, sampled: list[int | None]) -> list[Sequence]:
        """Takes note that `batch` was computed and returns the sequences that are now held, next token appended.

        `sampled` has one entry for each scheduled sequence: the token sampled if the chunk reached the last token,
        else None. Aborted sequences are dropped whatever their entry; so a batch whose forward failed is completed
        by aborting its sequences first and passing None for each.

        Raises:
            ValueError: entries are missing, or one is None where a token is needed; nothing is changed.
        """
        check_sampled(batch, sampled)
        done = [item.sequence for item, token in zip(batch.scheduled, sampled, strict=True) if self._note(item, token)]
        self._computing = {}
        return done

    def release(self, key: RequestKey) -> None:
        """Frees what is held for exactly this attempt; does nothing when nothing is."""
        for sequence in [item for item in self._held if item.key == key]:
            sequence.status = SequenceStatus.FINISHED
            self._forget(sequence)

    def to_offer(self) -> list[Sequence]:
        """Sequences to offer to a receiver now, each returned once: all that run, or would in the next step.

        Not earlier, because a place kept for a prompt that waits starves those that are ready. While a batch is
        computed, the next step is the one after it.
        """
        candidates = dict.fromkeys(chain(self._held, self._running, self._plan(taken=0)))
        fresh = [
            sequence
            for sequence in candidates
            if sequence not in self._offered and sequence.status is not SequenceStatus.ABORTED
        ]
        self._offered.update(fresh)
        return fresh

    def take(self, sequence: Sequence) -> None:
        """Lets a held sequence go with its blocks, which the caller must release."""
        self._held.remove(sequence)
        self._offered.discard(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that runs here or with the caller, and queues it to be computed again.

        Preempted sequences start before those that never ran, the earliest arrival first (recompute as in vLLM).
        """
        self._forget(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.PREEMPTED
        insort(self._waiting, sequence, key=_rank)

    def _need(self, sequence: Sequence) -> int:
        return self._blocks.blocks_for(len(sequence.token_ids))

    def _plan(self, taken: int) -> dict[Sequence, int]:
        """Tokens that the next step computes of each sequence, of those that run and those that would start.

        The oldest has its share, so that it moves whatever else comes. The rest is for those that miss the fewest
        tokens. Numbers with as many bits count as equal, and then who came first is first: so a prompt is not set aside
        for one that is hardly shorter, few are half computed at a time, and of those that begin alike the first
        computes what the others find.
        """
        tokens = self._max_batch_tokens - taken
        missing = dict(chain(self._unfinished(), self._startable(self._max_num_seqs - taken)))
        if tokens < 1 or not missing:
            return {}
        oldest = min(missing, key=lambda sequence: sequence.arrival)
        plan = {oldest: min(missing[oldest], max(1, tokens // OLDEST_SHARE))}
        tokens -= plan[oldest]
        for sequence in sorted(missing, key=lambda sequence: (missing[sequence].bit_length(), sequence.arrival)):
            planned = plan.get(sequence, 0)
            if num_tokens := min(tokens, missing[sequence] - planned):
                plan[sequence] = planned + num_tokens
                tokens -= num_tokens
        return plan

    def _unfinished(self) -> Iterator[tuple[Sequence, int]]:
        """Sequences that run, with the number of their tokens that are in no chunk yet, if there are any."""
        for sequence in self._running:
            missing = sequence.num_uncomputed_tokens - self._computing.get(sequence, 0)
            if missing and sequence.status is not SequenceStatus.ABORTED:
                yield sequence, missing

    def _startable(self, max_num_seqs: int) -> Iterator[tuple[Sequence, int]]:
        """Waiting sequences that have room, with the tokens each must compute: all before it would have room too.

        They end at the first that does not fit, and after the preempted ones if there are any, which start before all
        others. Whoever starts leaves the blocks of those passed over free, though a decoding sequence may grow into
        them. Cached blocks count as free until somebody uses them. When one starts, cached blocks may go that the next
        one would have found; then its chunk does not reach as far, but its blocks are there all the same.
        """
        free = self._blocks.num_free
        seats = max_num_seqs - len(self._running)
        others = len(self._running) + len(self._held)
        for sequence in self._waiting[: max(0, seats)]:
            if sequence.status is not self._waiting[0].status:
                return
            found = self._prefixes.find(sequence)
            free -= self._need(sequence) - found.num_in_use
            if free < self._reserve(others):
                return
            others += 1
            yield sequence, len(sequence.token_ids) - found.num_blocks * self._blocks.block_size

    def _start(self, sequence: Sequence) -> None:
        first_time = sequence.status is SequenceStatus.WAITING
        self._waiting.remove(sequence)
        found = self._prefixes.claim(sequence)
        sequence.block_table = found + self._blocks.allocate(self._need(sequence) - len(found))
        sequence.num_computed_tokens = len(found) * self._blocks.block_size
        # What it finds after a preemption it may have computed itself.
        most = sequence.num_computed_tokens if first_time else sequence.num_cached_tokens
        sequence.num_cached_tokens = min(most, sequence.num_computed_tokens)
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)

    def _note(self, item: ScheduledSequence, token: int | None) -> bool:
        """Advances one sequence; True when it is done."""
        sequence = item.sequence
        if sequence.status is SequenceStatus.ABORTED:
            self._forget(sequence)
            return False
        sequence.num_computed_tokens += item.num_tokens
        self._prefixes.publish(sequence, item.num_tokens)
        if token is None:
            return False
        sequence.token_ids.append(token)
        sequence.status = SequenceStatus.HELD
        self._running.remove(sequence)
        self._held.append(sequence)
        return True

    def _forget(self, sequence: Sequence) -> None:
        for queue in (self._waiting, self._running, self._held):
            if sequence in queue:
                queue.remove(sequence)
        self._offered.discard(sequence)
        self._blocks.release(sequence.block_table)
        sequence.block_table = []


def _half_of(num_blocks: int) -> Callable[[int], int]:
    return lambda others: num_blocks - num_blocks // 2 if others else 0


def _rank(sequence: Sequence) -> tuple[bool, int]:
    return sequence.status is not SequenceStatus.PREEMPTED, sequence.arrival


def check_sampled(batch: Batch, sampled: list[int | None]) -> None:
    """Checks the results of a forward pass: a token for each sequence whose last token it reached, None for others.

    Raises:
        ValueError: they are not that.
    """
    if len(sampled) != len(batch.scheduled):
        raise ValueError(
            f"{len(batch.scheduled)} sequences were computed and {len(sampled)} results given, not one each."
        )
    for item, token in zip(batch.scheduled, sampled, strict=True):
        alive = item.sequence.status is not SequenceStatus.ABORTED
        if alive and item.samples == (token is None):
            raise ValueError(
                f"Sample {item.sequence.sample} of {item.sequence.key.request_id} got the token {token}, but its chunk "
                f"{'reached' if item.samples else 'did not reach'} the last token; give a token exactly if it did."
            )
