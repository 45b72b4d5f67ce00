"""Real prefill and decode processes, driven message by message: what is wrong is counted and refused, never fatal."""

import os
import signal
from collections.abc import Iterator

import pytest
import zmq

from kvrelay.channel import MAX_MESSAGE_BYTES, Connection, Route, routing_id
from kvrelay.messages import (
    Abort,
    DecodeStarted,
    Drain,
    GenerateRequest,
    KVCommit,
    KVGrant,
    KVRefusal,
    KVReject,
    LeaseId,
    OutputAck,
    RefusalReason,
    RejectReason,
    RequestFailed,
    Resend,
    StepOutput,
    WorkerHello,
    WorkerStatus,
)
from kvrelay.types import Incarnation
from tests.e2e.cluster import wait_for
from tests.e2e.wire import GATEWAY, WireGateway, offer, prefill_request, wire_gateway
from tests.tiny_model import write_tiny_model

PEER: Incarnation = 4242
PROMPT = tuple(range(40))
OPTIONS = {"dtype": "float32", "kv_memory": "8M", "threads": 1, "lease_s": 5.0}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WireGateway]:
    folder = tmp_path_factory.mktemp("wire")
    model = write_tiny_model(folder / "tiny")
    roles: dict[str, dict[str, object]] = {
        "p": {"role": "prefill", **OPTIONS, "max_batch_tokens": 16},
        "d": {"role": "decode", **OPTIONS},
        "b": {"role": "both", **OPTIONS},
    }
    with wire_gateway(folder, model, **roles) as gateway:
        yield gateway


@pytest.fixture
def p(gateway: WireGateway) -> WorkerHello:
    return gateway.hellos["p"]


@pytest.fixture
def d(gateway: WireGateway) -> WorkerHello:
    return gateway.hellos["d"]


@pytest.fixture
def peer(gateway: WireGateway, d: WorkerHello) -> Iterator[Connection]:
    connection = gateway.connect(d, PEER)
    yield connection
    connection.close()


def is_idle(status: WorkerStatus) -> bool:
    return status.ledger.leased == 0 and status.ledger.conserved


def local(gateway: WireGateway, request_id: str, max_tokens: int) -> list[int]:
    """What the colocated worker makes of the prompt."""
    both = gateway.hellos["b"]
    asked = prefill_request(both, (both,), request_id, PROMPT, max_tokens)
    fields = asked.model_dump(exclude={"kind", "candidates"})
    gateway.send(both, GenerateRequest.model_validate(fields))
    return gateway.tokens(request_id, max_tokens)


def test_a_handed_over_prompt_gives_the_tokens_of_a_colocated_one(
    gateway: WireGateway, p: WorkerHello, d: WorkerHello
) -> None:
    gateway.send(p, prefill_request(p, (d,), "same", PROMPT, 12))
    tokens = gateway.tokens("same", 12)
    assert tokens == local(gateway, "same-local", 12)
    gateway.status(p, is_idle)
    gateway.status(d, is_idle)


def test_outputs_are_sent_again_until_acknowledged(gateway: WireGateway, p: WorkerHello, d: WorkerHello) -> None:
    gateway.send(p, prefill_request(p, (d,), "again", PROMPT, 6))
    tokens = gateway.tokens("again", 6)
    about = {"source": GATEWAY, "target": d.source, "request_id": "again", "attempt": 0}
    gateway.send(d, Resend(**about, sample=0, from_index=2))
    again = gateway.next(StepOutput, "again")
    assert [output.token_id for output in again.outputs] == tokens[2:]
    gateway.send(d, OutputAck(**about))
    gateway.send(d, Resend(**about, sample=0, from_index=2))
    assert gateway.next(RequestFailed, "again").code == "unknown_request"  # never "done"


def test_the_first_token_of_a_request_that_ends_with_it_comes_from_prefill_alone(
    gateway: WireGateway, p: WorkerHello, d: WorkerHello
) -> None:
    gateway.send(p, prefill_request(p, (d,), "single", PROMPT, 1))
    step = gateway.next(StepOutput, "single")
    assert [(output.index, output.finish_reason) for output in step.outputs] == [(0, "length")]
    gateway.status(p, is_idle)
    gateway.status(d, lambda status: is_idle(status) and status.load.num_offers == 0)


def test_a_duplicate_request_is_computed_once(gateway: WireGateway, p: WorkerHello, d: WorkerHello) -> None:
    before = gateway.status(p, lambda _: True).counters.get("duplicate_request", 0)
    long = tuple(range(200)) * 4
    for _ in range(3):
        gateway.send(p, prefill_request(p, (d,), "twice", long, 3))
    gateway.next(DecodeStarted, "twice")
    gateway.status(p, lambda status: status.counters.get("duplicate_request", 0) == before + 2)


def test_an_abort_stops_it_everywhere(gateway: WireGateway, p: WorkerHello, d: WorkerHello) -> None:
    gateway.send(p, prefill_request(p, (d,), "gone", PROMPT, 1500))
    gateway.next(DecodeStarted, "gone")
    for worker in (p, d):
        gateway.send(worker, Abort(source=GATEWAY, target=worker.source, request_id="gone", attempt=0))
    gateway.status(d, is_idle)
    gateway.status(p, is_idle)


def test_an_abort_that_comes_before_its_offer_is_remembered(
    gateway: WireGateway, d: WorkerHello, peer: Connection
) -> None:
    gateway.send(d, Abort(source=GATEWAY, target=d.source, request_id="early", attempt=3))
    gateway.status(d, lambda _: True)
    peer.send(offer(d, PEER, "early", attempt=3))
    answer = wait_for("an answer", peer.receive)[0]
    assert isinstance(answer, KVReject)
    assert answer.reason is RejectReason.ABORTED


def test_a_prompt_with_a_token_that_does_not_exist_is_refused(
    gateway: WireGateway, p: WorkerHello, d: WorkerHello
) -> None:
    gateway.send(p, prefill_request(p, (d,), "bad-token", (1, 10**6), 3))
    failed = gateway.next(RequestFailed, "bad-token")
    assert failed.code == "invalid_request"
    assert str(10**6) in failed.message


def test_a_prompt_longer_than_the_context_is_refused(gateway: WireGateway, p: WorkerHello, d: WorkerHello) -> None:
    gateway.send(p, prefill_request(p, (d,), "too-long", (1,) * 5000, 3))
    assert gateway.next(RequestFailed, "too-long").code == "context_length_exceeded"


def test_another_model_is_refused_by_name(d: WorkerHello, peer: Connection) -> None:
    peer.send(offer(d, PEER, "other-model", fingerprint="f" * 64))
    answer = wait_for("an answer", peer.receive)[0]
    assert isinstance(answer, KVRefusal)
    assert answer.reason is RefusalReason.INCOMPATIBLE
    assert "f" * 64 in answer.message


def test_what_was_meant_for_a_dead_incarnation_is_answered_stale(d: WorkerHello, peer: Connection) -> None:
    peer.send(offer(d, PEER, "stale", target=d.source ^ 1))
    answer = wait_for("an answer", peer.receive)[0]
    assert isinstance(answer, KVReject)
    assert answer.reason is RejectReason.STALE


def test_a_commit_that_nobody_offered_is_unknown(d: WorkerHello, peer: Connection) -> None:
    lease = LeaseId(d.source, 10**6)
    about = {"source": PEER, "target": d.source, "request_id": "never", "attempt": 0}
    peer.send(KVCommit(**about, lease_id=lease, first_token_ids=(1,)))
    answer = wait_for("an answer", peer.receive)[0]
    assert isinstance(answer, KVReject)
    assert answer.reason is RejectReason.UNKNOWN


def test_a_sender_that_vanishes_gives_its_blocks_back(gateway: WireGateway, d: WorkerHello) -> None:
    vanishing = gateway.connect(d, PEER + 1)
    vanishing.send(offer(d, PEER + 1, "vanishing", lease_s=5.0))
    assert isinstance(wait_for("a grant", vanishing.receive)[0], KVGrant)
    gateway.status(d, lambda status: status.ledger.leased > 0)
    vanishing.close()
    gateway.status(d, is_idle)


def test_a_lease_that_is_never_committed_ends_by_itself(gateway: WireGateway, d: WorkerHello, peer: Connection) -> None:
    peer.send(offer(d, PEER, "silent", lease_s=0.5))
    assert isinstance(wait_for("a grant", peer.receive)[0], KVGrant)
    gateway.status(d, is_idle)


@pytest.mark.parametrize("socket", ["control", "data"])
def test_garbage_is_counted_and_harms_nobody(gateway: WireGateway, d: WorkerHello, socket: str) -> None:
    stranger = gateway.context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, bytes(Route(9, 0)) if socket == "control" else routing_id(9))
    stranger.connect(d.control_endpoint if socket == "control" else d.data_endpoints["zmq"])
    for garbage in ([b""], [b"\x00" * 100], [b'{"kind":"kv_offer"}'], [b"a", b"b", b"c"], [os.urandom(300), b"x"]):
        stranger.send_multipart(garbage)
    counter = "malformed_message" if socket == "control" else "payload_malformed"
    gateway.status(d, lambda status: status.counters.get(counter, 0) >= 5)
    stranger.send(b"x" * (MAX_MESSAGE_BYTES * 5))
    stranger.close(linger=1000)
    assert len(local(gateway, f"fine-{socket}", 3)) == 3
    gateway.status(d, is_idle)


def test_a_worker_that_drains_refuses_what_is_new(gateway: WireGateway) -> None:
    both = gateway.hellos["b"]
    gateway.send(both, Drain(source=GATEWAY, target=both.source))
    gateway.status(both, lambda status: status.draining)
    asked = prefill_request(both, (both,), "late", PROMPT, 3).model_dump(exclude={"kind", "candidates"})
    gateway.send(both, GenerateRequest.model_validate(asked))
    assert gateway.next(RequestFailed, "late").code == "draining"


def test_a_killed_decode_worker_is_passed_over_for_the_next_candidate(
    gateway: WireGateway, p: WorkerHello, d: WorkerHello
) -> None:
    both = gateway.hellos["b"]
    os.kill(both.pid, signal.SIGSTOP)  # it holds its connections open and says nothing
    try:
        gateway.send(p, prefill_request(p, (both, d), "passed-over", PROMPT, 3))
        gateway.status(p, lambda status: status.load.num_held == 1)
    finally:
        os.kill(both.pid, signal.SIGCONT)
    gateway.next(DecodeStarted, "passed-over")  # the drained one refuses, the next one takes it
    gateway.status(p, is_idle)
