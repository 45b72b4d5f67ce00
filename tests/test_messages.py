"""Every wire message: the same after a round trip, refused when anything about it is off."""

import functools
import json
import operator
import random
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvrelay.channel import MAX_MESSAGE_BYTES
from kvrelay.encoding import DIGEST_BYTES, decode, encode, seal
from kvrelay.errors import WireError
from kvrelay.events import Event
from kvrelay.messages import (
    Abort,
    AnyMessage,
    BlockRun,
    DecodeStarted,
    Drain,
    GatewayHello,
    GenerateRequest,
    KVAck,
    KVCommit,
    KVGrant,
    KVOffer,
    KVRefusal,
    KVReject,
    KVReleased,
    KVRepair,
    LeaseId,
    Ledger,
    Message,
    OutputAck,
    Peer,
    PrefillRequest,
    RefusalReason,
    RejectReason,
    RequestEvents,
    RequestFailed,
    Resend,
    StepOutput,
    TokenOutput,
    WorkerHello,
    WorkerLoad,
    WorkerStatus,
)
from kvrelay.types import (
    LOWEST_LOGPROB,
    MAX_LOGPROBS,
    FinishReason,
    KVLayout,
    Role,
    SamplingParams,
    TokenLogprobs,
    TopLogprob,
)
from kvrelay.worker import MAX_OUTPUTS

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
LEASE = LeaseId(2**64 - 1, 7)
PEER = Peer(name="decode-0", incarnation=5, control_endpoint="tcp://h:1", data_endpoints={"zmq": "tcp://h:2"})
PARAMS = SamplingParams(max_tokens=3, temperature=0.7, seed=2**64 - 1, stop_token_ids=(1, 2))
ABOUT = {"source": 2**64 - 1, "target": 1, "request_id": "r", "attempt": 2}
PROMPT = {**ABOUT, "prompt_token_ids": (1, 2, 3), "params": PARAMS}

LOGPROBS = TokenLogprobs(-0.1 - 2**-53, (TopLogprob(7, -5e-324), TopLogprob(3, LOWEST_LOGPROB)))
MESSAGES: list[Message] = [
    WorkerHello(
        source=1,
        name="p",
        role=Role.PREFILL,
        control_endpoint="tcp://h:1",
        data_endpoints={"zmq": "tcp://h:2"},
        model="m",
        fingerprint="f",
        max_model_len=8192,
        vocab_size=49152,
        max_num_seqs=64,
        layout=LAYOUT,
        device="cpu",
        pid=1,
        host="h",
    ),
    WorkerStatus(
        source=1, ledger=Ledger(total=4, free=1, cached=1, leased=1, revoked=1), load=WorkerLoad(), counters={"a": 1}
    ),
    StepOutput(
        source=1,
        outputs=(
            TokenOutput(request_id="r", attempt=0, sample=0, index=5, token_id=7, finish_reason=FinishReason.STOP),
            TokenOutput(request_id="r", attempt=0, sample=0, index=6, token_id=7, logprobs=LOGPROBS),
        ),
    ),
    DecodeStarted(**ABOUT),
    RequestFailed(**ABOUT, code="worker_lost", message="Gone."),
    GatewayHello(source=1, registered=False),
    PrefillRequest(**PROMPT, candidates=(PEER,)),
    GenerateRequest(**PROMPT),
    Abort(**ABOUT, reason="client left"),
    OutputAck(**ABOUT),
    Resend(**ABOUT, sample=0, from_index=3),
    Drain(source=1),
    KVOffer(**PROMPT, gateway=9, fingerprint="f", layout=LAYOUT, lease_s=30.0),
    KVCommit(**ABOUT, lease_id=LEASE, first_token_ids=(4,), first_logprobs=(LOGPROBS,)),
    KVReleased(source=1, lease_id=LEASE),
    KVGrant(**ABOUT, lease_id=LEASE, block_ids=(0, 5), block_size=16, held_blocks=1),
    KVRefusal(**ABOUT, reason=RefusalReason.QUEUE_FULL, message="Full."),
    RequestEvents(**ABOUT, ages_s={Event.PREFILL_BEGIN: 0.5, Event.PREFILL_END: 0.25}),
    KVRepair(**ABOUT, lease_id=LEASE, runs=(BlockRun(2, 0, 3),)),
    KVAck(**ABOUT, lease_id=LEASE),
    KVReject(**ABOUT, reason=RejectReason.STALE),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


def test_logprobs_keep_every_bit() -> None:
    bits = random.Random(0)
    for _ in range(1000):
        logprob = -bits.uniform(0, 1) * 10.0 ** bits.randint(-300, 3)
        output = TokenOutput(
            request_id="r", attempt=0, sample=0, index=0, token_id=0, logprobs=TokenLogprobs(logprob, ())
        )
        sent = decode(encode(StepOutput(source=1, outputs=(output,))))
        assert isinstance(sent, StepOutput)
        told = sent.outputs[0].logprobs
        assert told is not None
        assert told.logprob.hex() == logprob.hex()


@pytest.mark.parametrize("logprobs", [[0.5, []], ["x", []], [-1.0, [[0, -1.0]] * 21], [-1.0, [[-1, -1.0]]], [-1e4, []]])
def test_logprobs_that_cannot_be_are_refused(logprobs: list[object]) -> None:
    fields = fields_of(KVCommit(**ABOUT, lease_id=LEASE, first_token_ids=(4,)))
    with pytest.raises(WireError, match="first_logprobs"):
        decode(frame_of(fields | {"first_logprobs": [logprobs]}))


def test_the_largest_message_of_tokens_is_far_smaller_than_what_a_socket_takes() -> None:
    """A repeated answer with all logprobs is cut into messages of so many tokens."""
    top = tuple(TopLogprob(2**31 - 1, -1234.5678901234567) for _ in range(MAX_LOGPROBS))
    largest = TokenOutput(
        request_id="r" * 256,
        attempt=2**63 - 1,
        sample=2**63 - 1,
        index=2**63 - 1,
        token_id=2**31 - 1,
        finish_reason=FinishReason.LENGTH,
        cached_tokens=2**63 - 1,
        logprobs=TokenLogprobs(-1234.5678901234567, top),
    )
    assert len(encode(StepOutput(source=2**64 - 1, outputs=(largest,) * MAX_OUTPUTS))) < MAX_MESSAGE_BYTES // 8


def fields_of(message: Message) -> dict[str, Any]:
    """As JSON values."""
    fields: dict[str, Any] = message.model_dump(mode="json")
    return fields


def frame_of(fields: dict[str, Any]) -> bytes:
    """As it would be if its type allowed it."""
    return seal(json.dumps(fields).encode())


def test_every_kind_has_a_round_trip() -> None:
    union = typing.get_args(typing.get_args(AnyMessage)[0])
    assert {type(message) for message in MESSAGES} == set(union)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_field_nobody_knows_is_refused(message: Message) -> None:
    with pytest.raises(WireError, match="surprise"):
        decode(frame_of({**fields_of(message), "surprise": 1}))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_truncated_message_is_refused(message: Message) -> None:
    frame = encode(message)
    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode(frame[:length])


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(WireError, match="nonsense"):
        decode(frame_of({"kind": "nonsense", "source": 1}))


def lists_in(value: object, *path: str) -> Iterator[tuple[str, ...]]:
    """Where a message has lists."""
    for name, item in value.items() if isinstance(value, dict) else ():
        yield from lists_in(item, *path, name)
    if isinstance(value, list):
        yield path


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_list_is_refused_at_its_first_wrong_item(message: Message) -> None:
    """A frame of 16 MB holds millions of them; noting each took minutes and gigabytes."""
    for *parents, name in lists_in(fields_of(message)):
        fields = fields_of(message)
        functools.reduce(operator.getitem, parents, fields)[name] = [{}] * 1000
        with pytest.raises(WireError, match=name) as refused:
            decode(frame_of(fields))
        assert isinstance(refused.value.__cause__, ValidationError)
        assert refused.value.__cause__.error_count() <= len(TokenOutput.model_fields)


def test_of_very_many_wrong_fields_only_the_number_is_told() -> None:
    fields = {"kind": "drain", "source": 1, **{f"f{number}": 0 for number in range(1000)}}
    with pytest.raises(WireError, match="1000 fields are wrong or unknown"):
        decode(frame_of(fields))


def test_a_worker_counts_in_no_more_than_some_names() -> None:
    ledger = Ledger(total=1, free=1, cached=0, leased=0, revoked=0)
    status = WorkerStatus(source=1, ledger=ledger, load=WorkerLoad()).model_dump(mode="json")
    with pytest.raises(WireError, match="counters"):
        decode(frame_of({**status, "counters": {f"c{number}": 0 for number in range(1000)}}))


@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_fail(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)


@given(st.binary(max_size=200))
def test_random_bytes_behind_their_digest_never_do_more_than_fail(text: bytes) -> None:
    with pytest.raises(WireError):
        decode(seal(text))


@given(st.sampled_from(MESSAGES), st.data())
def test_a_flipped_bit_is_noticed_wherever_it_is(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError, match="digest"):
        decode(bytes(frame))


def test_a_message_that_was_changed_into_another_one_is_refused() -> None:
    frame = encode(Resend(source=1, request_id="r", attempt=1, sample=0, from_index=7))
    changed = frame.replace(b'"from_index":7', b'"from_index":6')
    assert decode(seal(changed[DIGEST_BYTES:])).kind == "resend"
    with pytest.raises(WireError, match="do not begin with the digest"):
        decode(changed)
