"""Every message on the control sockets: one union, discriminated by `kind`, as JSON behind a digest of it.

Each message names the incarnation it is from and the one it is for (0 where the sender cannot know it yet), so that
nothing said by or to a process that has died is taken for the living one. KV payload does not travel here: see
transfer/piece.py.

A flipped bit may leave JSON that means something else: another token, another block. The digest makes it noticed.
"""

from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field

from kvrelay.events import Event
from kvrelay.types import (
    FinishReason,
    Incarnation,
    KVLayout,
    RequestKey,
    Role,
    SamplingParams,
    TokenId,
    TokenLogprobs,
)

Count = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
CacheSalt = Annotated[str, Field(max_length=256)]
MAX_REPAIRS = 256
MAX_PAIRS = 256

# The first item that is wrong ends a list: noting what is wrong with each of a million takes minutes and gigabytes.
Counts = Annotated[tuple[Count, ...], FailFast()]
TokenIds = Annotated[tuple[TokenId, ...], FailFast()]


DataEndpoints = Annotated[dict[Name, Name], Field(min_length=1, max_length=8)]  # by the transport's name


WorkerEvent = Literal[Event.PREFILL_BEGIN, Event.PREFILL_END, Event.TRANSFER_BEGIN, Event.TRANSFER_END]


class LeaseId(NamedTuple):
    """Names one grant, for ever: the receiver's incarnation and its own counter."""

    incarnation: Incarnation
    counter: Count


class BlockRun(NamedTuple):
    """Adjacent blocks of one layer, counted from the sequence's first block."""

    layer: Count
    first_block: Count
    num_blocks: Count


class Wire(BaseModel):
    """A frozen value that says no to fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Message(Wire):
    """Who says it and who it is for, as incarnations; `target` 0 means whoever is there."""

    source: Incarnation
    target: Incarnation = 0


class AboutRequest(Message):
    """A message about one attempt at one request."""

    request_id: Name
    attempt: Count

    @property
    def key(self) -> RequestKey:
        """The attempt it is about."""
        return RequestKey(self.request_id, self.attempt)


class Peer(Wire):
    """Where a receiver of KV can be reached and which incarnation should be there."""

    name: Name
    incarnation: Incarnation
    control_endpoint: Name
    data_endpoints: DataEndpoints


class TokenOutput(Wire):
    """Generated token `index` of one sample; the last one says why the sample ended.

    The first one tells how many tokens of the prompt were found in a cache and not computed. `logprobs` are there if
    the request asks for them.
    """

    request_id: Name
    attempt: Count
    sample: Count
    index: Count
    token_id: TokenId
    finish_reason: FinishReason | None = None
    cached_tokens: Count = 0
    logprobs: TokenLogprobs | None = None

    @property
    def key(self) -> RequestKey:
        """The attempt it belongs to."""
        return RequestKey(self.request_id, self.attempt)


class Ledger(Wire):
    """Blocks by state; they always add up to `total`."""

    total: Count
    free: Count
    cached: Count
    leased: Count
    revoked: Count

    @property
    def conserved(self) -> bool:
        """True while no block is lost or counted twice."""
        return self.free + self.cached + self.leased + self.revoked == self.total


class WorkerLoad(Wire):
    """What a worker has to do. `num_waiting_tokens` are prompt tokens not computed yet."""

    num_waiting: Count = 0
    num_running: Count = 0
    num_held: Count = 0
    num_offers: Count = 0
    num_waiting_tokens: Count = 0


class RefusalReason(StrEnum):
    """Why a receiver will not take a sequence."""

    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"


class RejectReason(StrEnum):
    """Why a receiver turns down what it was told about a lease or an attempt."""

    STALE = "stale"  # meant for another incarnation
    ABORTED = "aborted"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    UNKNOWN = "unknown"


# worker -> gateway


class WorkerHello(Message):
    """A worker introduces itself, on every new connection and whenever a gateway says that it does not know it."""

    kind: Literal["worker_hello"] = "worker_hello"
    name: Name
    role: Role
    control_endpoint: Name
    data_endpoints: DataEndpoints
    model: Name
    fingerprint: Name
    max_model_len: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1)
    layout: KVLayout
    weights: str = Field(default="", max_length=64)  # how they are kept; KV computed with others is not the same
    device: Name
    pid: Count
    host: Name


class PairStatus(Wire):
    """What a sender of KV knows of its hand-overs to one receiver; all but the first two only grow.

    `transfer_s` is from the first piece to the Ack, `grant_wait_s` from an Offer to its Grant, each summed over all.
    `num_damaged` of the pieces that were asked for once more, or for the second time, had a wrong digest.
    """

    receiver: Incarnation
    transport: str = Field(default="", max_length=256)  # agreed on; empty before
    num_handovers: Count = 0
    num_bytes: Count = 0
    num_grants: Count = 0
    num_refusals: Count = 0
    num_repairs: Count = 0
    num_damaged: Count = 0
    transfer_s: float = Field(default=0.0, ge=0)
    grant_wait_s: float = Field(default=0.0, ge=0)


class WorkerStatus(Message):
    """A worker's heartbeat. `counters` only grow: what was dropped, refused, repeated, and how often."""

    kind: Literal["worker_status"] = "worker_status"
    ledger: Ledger
    load: WorkerLoad
    draining: bool = False
    counters: dict[Name, Count] = Field(default={}, max_length=256)
    pairs: Annotated[tuple[PairStatus, ...], FailFast()] = Field(default=(), max_length=MAX_PAIRS)


class StepOutput(Message):
    """All new tokens of one step that belong to one gateway."""

    kind: Literal["step_output"] = "step_output"
    outputs: Annotated[tuple[TokenOutput, ...], FailFast()]


class RequestEvents(AboutRequest):
    """What happened to an attempt at a worker, each so many seconds before this was said."""

    kind: Literal["request_events"] = "request_events"
    ages_s: dict[WorkerEvent, Annotated[float, Field(ge=0)]] = Field(min_length=1)


class DecodeStarted(AboutRequest):
    """A decode worker has the KV whole and intact and generates from here on."""

    kind: Literal["decode_started"] = "decode_started"


class RequestFailed(AboutRequest):
    """A worker gives an attempt up. `code` is one of errors.RequestError's."""

    kind: Literal["request_failed"] = "request_failed"
    code: Name
    message: Text


# gateway -> worker


class GatewayHello(Message):
    """A gateway's heartbeat. `registered` False asks for a WorkerHello."""

    kind: Literal["gateway_hello"] = "gateway_hello"
    registered: bool


class AboutPrompt(AboutRequest):
    """What a worker must know to compute a prompt. KV is shared only between prompts with the same `cache_salt`."""

    prompt_token_ids: TokenIds = Field(min_length=1)
    params: SamplingParams
    num_samples: int = Field(default=1, ge=1, le=128)
    cache_salt: CacheSalt = ""


class PrefillRequest(AboutPrompt):
    """Compute the prompt and push its KV to the first of `candidates` that takes it."""

    kind: Literal["prefill_request"] = "prefill_request"
    candidates: Annotated[tuple[Peer, ...], FailFast()] = Field(min_length=1, max_length=64)


class GenerateRequest(AboutPrompt):
    """Compute the prompt and generate from it in the same worker."""

    kind: Literal["generate_request"] = "generate_request"


class Abort(AboutRequest):
    """Drop every attempt up to this one. Also from sender to receiver of KV."""

    kind: Literal["abort"] = "abort"
    reason: Text = ""


class OutputAck(AboutRequest):
    """The gateway has every token of the finished attempt; the worker need not keep them."""

    kind: Literal["output_ack"] = "output_ack"


class Resend(AboutRequest):
    """Send the tokens of a sample from `from_index` on once more."""

    kind: Literal["resend"] = "resend"
    sample: Count
    from_index: Count


class Drain(Message):
    """Take nothing new; finish what is there."""

    kind: Literal["drain"] = "drain"


# sender -> receiver of KV


class KVOffer(AboutPrompt):
    """A prompt's KV is being computed: may it come? Asked again until answered.

    `gateway` is the incarnation that owns the request, to which the receiver sends its tokens. `lease_s` is how long
    the sender will hold the blocks, counted on each side from its own first message.
    """

    kind: Literal["kv_offer"] = "kv_offer"
    gateway: Incarnation
    fingerprint: Name
    layout: KVLayout
    lease_s: float = Field(gt=0, le=86400)


class KVCommit(AboutRequest):
    """Every piece was sent; `first_token_ids` holds one token for each sample.

    `num_repaired` of the runs of a KVRepair were sent again before. `cached_tokens` and `first_logprobs` (one for each
    sample, or none) are what TokenOutput says with the first token, should the receiver have to tell that again.
    """

    kind: Literal["kv_commit"] = "kv_commit"
    lease_id: LeaseId
    first_token_ids: TokenIds = Field(min_length=1, max_length=128)
    num_repaired: Count = 0
    cached_tokens: Count = 0
    first_logprobs: Annotated[tuple[TokenLogprobs, ...], FailFast()] = Field(default=(), max_length=128)


class KVReleased(Message):
    """The sender will not write under this lease any more."""

    kind: Literal["kv_released"] = "kv_released"
    lease_id: LeaseId


# receiver -> sender of KV


class KVGrant(AboutRequest):
    """Blocks are reserved under a lease. `held_blocks` leading blocks are there already and must not be sent.

    The blocks are the receiver's and hold `block_size` tokens, which may be more or fewer than the sender's.
    `one_sided`: the receiver shares its memory with the sender, which may write into these blocks by itself. Only
    where it says so: blocks under any other lease are given to others as soon as the lease ends.
    """

    kind: Literal["kv_grant"] = "kv_grant"
    lease_id: LeaseId
    block_ids: Counts
    block_size: int = Field(ge=1, lt=2**16)
    held_blocks: Count = 0
    one_sided: bool = False


class KVRefusal(AboutRequest):
    """The receiver will not take this sequence; the sender may ask the next candidate."""

    kind: Literal["kv_refusal"] = "kv_refusal"
    reason: RefusalReason
    message: Text


class KVRepair(AboutRequest):
    """Some blocks arrived damaged, or not at all: send them again, each run once, then the Commit.

    `runs` are all that were ever asked for under this lease, so that a lost message is made up for by the next. From
    this message on the sender may write again, until a Commit says that it has sent as many runs as were asked for.
    `num_damaged` of the runs had a wrong digest; the others are missing.
    """

    kind: Literal["kv_repair"] = "kv_repair"
    lease_id: LeaseId
    runs: Annotated[tuple[BlockRun, ...], FailFast()] = Field(min_length=1, max_length=MAX_REPAIRS)
    num_damaged: Count = 0


class KVAck(AboutRequest):
    """The KV arrived whole and intact; the sender may free its blocks."""

    kind: Literal["kv_ack"] = "kv_ack"
    lease_id: LeaseId


class KVReject(AboutRequest):
    """The receiver will not go on with this attempt or lease.

    `meant_for` is set with the reason `stale`: the incarnation that the rejected message was meant for.
    """

    kind: Literal["kv_reject"] = "kv_reject"
    reason: RejectReason
    lease_id: LeaseId | None = None
    meant_for: Incarnation | None = None


AnyMessage = Annotated[
    WorkerHello
    | WorkerStatus
    | StepOutput
    | RequestEvents
    | DecodeStarted
    | RequestFailed
    | GatewayHello
    | PrefillRequest
    | GenerateRequest
    | Abort
    | OutputAck
    | Resend
    | Drain
    | KVOffer
    | KVCommit
    | KVReleased
    | KVGrant
    | KVRefusal
    | KVRepair
    | KVAck
    | KVReject,
    Field(discriminator="kind"),
]
