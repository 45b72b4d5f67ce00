"""Workers, layouts and routes that the gateway's tests talk about."""

from kvrelay.gateway.router import Route
from kvrelay.messages import Ledger, Peer, TokenOutput, WorkerHello, WorkerLoad, WorkerStatus
from kvrelay.types import FinishReason, KVLayout, Role, TokenLogprobs, TopLogprob

GATEWAY = 1
MODEL, FINGERPRINT = "tiny", "f" * 64


def layout(block_size: int = 16, dtype: str = "float32") -> KVLayout:
    """A small KV layout."""
    return KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=block_size, dtype=dtype)


def hello(
    incarnation: int,
    role: Role,
    *,
    fingerprint: str = FINGERPRINT,
    max_model_len: int = 256,
    max_num_seqs: int = 16,
    kv: KVLayout | None = None,
    port: int | None = None,
) -> WorkerHello:
    """How a worker introduces itself; its name, address and incarnation follow from one number."""
    return WorkerHello(
        source=incarnation,
        name=f"{role}-{incarnation}",
        role=role,
        control_endpoint=f"tcp://127.0.0.1:{port or incarnation}",
        data_endpoints={"zmq": f"tcp://127.0.0.1:{(port or incarnation) + 20_000}"},
        model=MODEL,
        fingerprint=fingerprint,
        max_model_len=max_model_len,
        vocab_size=256,
        max_num_seqs=max_num_seqs,
        layout=kv or layout(),
        device="cpu",
        pid=7,
        host="test",
    )


def status(incarnation: int, *, draining: bool = False, load: WorkerLoad | None = None) -> WorkerStatus:
    """A heartbeat of a worker with 10 blocks, 4 of them in use."""
    return WorkerStatus(
        source=incarnation,
        ledger=Ledger(total=10, free=6, cached=0, leased=4, revoked=0),
        load=load or WorkerLoad(),
        draining=draining,
        counters={"stale_message": 3},
    )


def peer(incarnation: int) -> Peer:
    """A decode candidate."""
    return Peer(
        name=f"d{incarnation}",
        incarnation=incarnation,
        control_endpoint="tcp://c:1",
        data_endpoints={"zmq": "tcp://d:1"},
    )


def route(first: int, *candidates: int) -> Route:
    """From a first worker to candidates."""
    return Route(first, tuple(peer(candidate) for candidate in candidates))


def token(
    index: int, *, request_id: str = "r", last: bool = False, attempt: int = 0, sample: int = 0, cached: int = 0
) -> TokenOutput:
    """Token `index`, whose id tells its index."""
    return TokenOutput(
        request_id=request_id,
        attempt=attempt,
        sample=sample,
        index=index,
        token_id=100 + index,
        finish_reason=FinishReason.LENGTH if last else None,
        cached_tokens=cached,
    )


def top_logprobs(count: int) -> TokenLogprobs:
    """The logprob of a token and those of the `count` likeliest, whose ids are letters: a, b, and so on."""
    return TokenLogprobs(-0.1 - 2**-56, tuple(TopLogprob(97 + rank, -1.0 - rank / 3) for rank in range(count)))
