"""The nouns that every part of KVRelay shares: what was asked, its life in a pool, and one step of work."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Incarnation = Annotated[int, Field(ge=0, lt=2**64)]
MAX_LOGPROBS = 20
_SCALE_BYTES = 4  # of the float32 that a head in int8 has
LOWEST_LOGPROB = -9999.0  # stands for all below it, -inf too, which JSON cannot say
Logprob = Annotated[float, Field(ge=LOWEST_LOGPROB, le=0.0)]


class Role(StrEnum):
    """What a worker does: build KV, generate from KV it received, or both by itself (colocated)."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class FinishReason(StrEnum):
    """Why a sample ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class TopLogprob(NamedTuple):
    """One of the likeliest tokens at a position."""

    token_id: TokenId
    logprob: Logprob


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, before temperature and filters: of a generated token, and
    of the likeliest ones at its position, falling, equal ones by their ids."""

    logprob: Logprob
    top: Annotated[tuple[TopLogprob, ...], FailFast(), Field(max_length=MAX_LOGPROBS)] = ()


class SampledToken(NamedTuple):
    """What a step gives for a sequence; `logprobs` only if its request asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class SamplingParams(BaseModel):
    """How tokens are chosen and when a sample ends. `seed` is always set: the gateway draws one if the user did not.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 filter nothing. `logprobs` is how many of the
    likeliest tokens are told beside each generated one with its own; None asks for neither. `stop` strings are not
    here: they are text, and text is the gateway's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=2**64)
    stop_token_ids: Annotated[tuple[TokenId, ...], FailFast()] = Field(default=(), max_length=256)
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class RequestKey(NamedTuple):
    """Names one attempt at one request. Only the gateway makes attempts."""

    request_id: str
    attempt: int

    def covers(self, other: "RequestKey") -> bool:
        """True when an abort of this attempt also ends `other`: the same request, this attempt or an earlier one."""
        return other.request_id == self.request_id and other.attempt <= self.attempt


class SequenceStatus(StrEnum):
    """Where a sequence stands in its pool."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"  # prefill done, blocks kept until the receiver has them
    PREEMPTED = "preempted"  # lost its blocks, will be computed again
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample's mutable life in one pool.

    `token_ids` is the prompt followed by what was generated. `num_computed_tokens` of them have their KV in the
    blocks of `block_table` (position p lies in block `block_table[p // block_size]` at offset `p % block_size`).
    `num_cached_tokens` of the prompt were found there and never computed for it. Only sequences with the same
    `cache_salt` share blocks; `block_hashes` names its leading full blocks, as far as that was needed. `logprobs` are
    those of the last generated token, if its request asks for them.
    """

    key: RequestKey
    sample: int
    gateway: int  # incarnation of the gateway that owns the request
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    arrival: int = 0  # order of arrival at this worker, set by its scheduler
    cache_salt: str = ""
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt, which is also the index of the next token to sample."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still missing; 1 for a sequence that is decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    def finish_reason(self, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Tells whether the last generated token ends the sample, and why."""
        if self.num_generated_tokens < 1:
            return None
        last = self.token_ids[-1]
        if last in self.params.stop_token_ids or (last in eos_token_ids and not self.params.ignore_eos):
            return FinishReason.STOP
        if self.num_generated_tokens >= self.params.max_tokens or len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: its next `num_tokens` uncomputed tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """True when the step reaches the sequence's last token, so that its logits give the next one."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward pass computes. Empty means there is nothing to do."""

    scheduled: tuple[ScheduledSequence, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.scheduled)

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(item.num_tokens for item in self.scheduled)


class KVLayout(BaseModel):
    """The shape of a KV cache. Per layer it is `kv[num_blocks, 2, num_kv_heads, block_size, head_dim]`.

    In int8 each head of a token is followed by its scale, a float32.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(ge=1, lt=2**16)
    num_kv_heads: int = Field(ge=1, lt=2**16)
    head_dim: int = Field(ge=1, lt=2**16)
    block_size: int = Field(ge=1, lt=2**16)
    dtype: str  # bfloat16, float16, float32 or int8

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token."""
        if self.dtype == "int8":
            return self.head_dim + _SCALE_BYTES
        return self.head_dim * (4 if self.dtype == "float32" else 2)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: one contiguous piece."""
        return 2 * self.num_kv_heads * self.block_size * self.row_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def why_not_from(self, sender: "KVLayout") -> str:
        """Why KV of the sender's layout cannot become KV of this one on arrival, as a sentence; empty if it can."""
        if sender.model_copy(update={"block_size": self.block_size}) != self:
            return (
                f"The sender's KV layout is {sender}, the receiver's {self}; start both with the same --dtype and "
                "--kv-cache-dtype."
            )
        large, small = max(self.block_size, sender.block_size), min(self.block_size, sender.block_size)
        if large % small:
            return (
                f"The sender's KV blocks hold {sender.block_size} tokens, the receiver's {self.block_size}: one must "
                "be a multiple of the other; start both with a fitting --block-size."
            )
        return ""

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers, {self.num_kv_heads} KV heads of {self.head_dim}, blocks of {self.block_size} "
            f"tokens, {self.dtype}"
        )
