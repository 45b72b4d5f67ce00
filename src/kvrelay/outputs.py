"""What a worker has told gateways, kept so that it can be told again."""

from dataclasses import dataclass, field

from kvrelay.messages import TokenOutput
from kvrelay.types import FinishReason, RequestKey, TokenLogprobs


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


@dataclass(slots=True)
class _Kept:
    samples: dict[int, _Sample]
    finished_at: float | None = None  # when the last of its samples ended, seconds


class OutputStore:
    """The tokens of each sample from index 0, until acknowledged, aborted, or expired after all samples ended.

    Bounded in number too: when `max_requests` are kept, a new one displaces the oldest finished one, or the oldest
    of all if none is finished. Times are seconds on any one monotonic clock, passed in.
    """

    def __init__(self, keep_s: float, max_requests: int) -> None:
        """Keeps finished requests for `keep_s` seconds and never more than `max_requests` requests.

        Raises:
            ValueError: nothing could be kept.
        """
        if keep_s <= 0 or max_requests < 1:
            raise ValueError(
                f"Outputs must be kept for some time and in some number, not {keep_s} s and {max_requests}."
            )
        self._keep_s = keep_s
        self._max_requests = max_requests
        self._kept: dict[RequestKey, _Kept] = {}

    def __len__(self) -> int:
        """Requests that are kept."""
        return len(self._kept)

    def open(self, key: RequestKey, num_samples: int) -> None:
        """Begins to keep a request, best when it is accepted: while it waits, it then has no tokens but is known."""
        if key in self._kept:
            return
        if len(self._kept) >= self._max_requests:
            finished = (known for known, kept in self._kept.items() if kept.finished_at is not None)
            del self._kept[next(finished, next(iter(self._kept)))]
        self._kept[key] = _Kept({sample: _Sample() for sample in range(num_samples)})

    def add(self, output: TokenOutput, now: float) -> None:
        """Keeps one token; token 0 opens its request and sample if need be.

        A token that is kept already changes nothing. A later token of a request that is not kept (it was displaced)
        is not kept either.

        Raises:
            ValueError: the index leaves a gap.
        """
        if output.index == 0:
            self.open(output.key, 1)
            self._kept[output.key].samples.setdefault(output.sample, _Sample())
        kept = self._kept.get(output.key)
        sample = kept.samples.get(output.sample) if kept else None
        if kept is None or sample is None or output.index < len(sample.token_ids):
            return
        if output.index > len(sample.token_ids):
            raise ValueError(
                f"Token {output.index} of sample {output.sample} of {output.request_id} came after "
                f"{len(sample.token_ids)} tokens; tokens must be kept in order, without a gap."
            )
        sample.token_ids.append(output.token_id)
        sample.logprobs.append(output.logprobs)
        sample.finish_reason = output.finish_reason
        if output.index == 0:
            sample.cached_tokens = output.cached_tokens
        if all(each.finish_reason for each in kept.samples.values()):
            kept.finished_at = now

    def resend(self, key: RequestKey, sample: int, from_index: int) -> list[TokenOutput] | None:
        """The tokens of a sample from `from_index` on, none if it has no more yet; None if it is not known."""
        kept = self._kept.get(key)
        if kept is None or sample not in kept.samples:
            return None
        known = kept.samples[sample]
        return [
            TokenOutput(
                request_id=key.request_id,
                attempt=key.attempt,
                sample=sample,
                index=index,
                token_id=known.token_ids[index],
                finish_reason=known.finish_reason if index == len(known.token_ids) - 1 else None,
                cached_tokens=known.cached_tokens if index == 0 else 0,
                logprobs=known.logprobs[index],
            )
            for index in range(from_index, len(known.token_ids))
        ]

    def ack(self, key: RequestKey) -> None:
        """Forgets an attempt whose tokens have all arrived; does nothing when it is not known."""
        self._kept.pop(key, None)

    def abort(self, key: RequestKey) -> None:
        """Forgets every attempt up to `key`."""
        for known in [known for known in self._kept if key.covers(known)]:
            del self._kept[known]

    def expire(self, now: float) -> int:
        """Forgets requests that ended `keep_s` ago or earlier; returns how many."""
        old = [
            key
            for key, kept in self._kept.items()
            if kept.finished_at is not None and now - kept.finished_at >= self._keep_s
        ]
        for key in old:
            del self._kept[key]
        return len(old)
