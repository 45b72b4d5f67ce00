"""The loop that workers share, around a colocated worker whose network is scripted."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import kvrelay.worker
from kvrelay.blocks import BlockManager
from kvrelay.decode.scheduler import DecodeScheduler
from kvrelay.decode.worker import DecodeWorker
from kvrelay.errors import InternalError
from kvrelay.mailbox import FromGateway, FromPeer, GatewayLost, Mailbox, Stop, ToGateway, ToPeer
from kvrelay.messages import (
    Abort,
    Drain,
    GenerateRequest,
    KVOffer,
    KVRefusal,
    Message,
    OutputAck,
    RefusalReason,
    RequestFailed,
    Resend,
    StepOutput,
    TokenOutput,
)
from kvrelay.outputs import OutputStore
from kvrelay.prefixes import Prefixes
from kvrelay.transfer.ports import Inlet
from kvrelay.transfer.protocol.actions import Adopt
from kvrelay.transfer.protocol.receiver import KVReceiver
from kvrelay.types import (
    Batch,
    KVLayout,
    RequestKey,
    SampledToken,
    SamplingParams,
    ScheduledSequence,
    Sequence,
    TokenLogprobs,
)
from kvrelay.worker import WorkerContext

GATEWAY, OTHER = 7, 8
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=8, dtype="float32")


@dataclass
class ScriptedRunner:
    """Gives each sequence the number of its tokens as the next one, or fails when it is told to.

    Of its logprob that number tells too, where it is asked for.
    """

    fails: bool = False
    batches: list[Batch] = field(default_factory=list)
    config: Any = field(default_factory=lambda: SimpleNamespace(eos_token_ids=frozenset(), max_model_len=100))

    def run(self, batch: Batch) -> Generator[int, None, list[SampledToken | None]]:
        self.batches.append(batch)
        yield 0
        if self.fails:
            raise InternalError("The network gave nan.")
        return [self._sampled(item) if item.samples else None for item in batch.scheduled]

    def _sampled(self, item: ScheduledSequence) -> SampledToken:
        token_id = len(item.sequence.token_ids)
        return SampledToken(
            token_id, None if item.sequence.params.logprobs is None else TokenLogprobs(-float(token_id))
        )


@dataclass
class Bench:
    """A worker, and both ends of what it hears and says."""

    worker: DecodeWorker
    runner: ScriptedRunner
    mailbox: Mailbox
    blocks: BlockManager

    def loop(self, *messages: Any, gateway: int = GATEWAY, steps: int = 30) -> list[Message]:
        """Lets the worker hear messages, run for so many rounds, and tells what it said to gateways."""
        for message in messages:
            event: Any = message if isinstance(message, GatewayLost) else FromGateway(gateway, message)
            self.mailbox.deliver(event)
        for _ in range(steps):
            assert self.worker.take_messages(0.0)
            batch = self.worker.schedule()
            self.worker.complete(batch, self.worker._try_compute(batch))
        return [order.message for order in self.mailbox.orders() if isinstance(order, ToGateway)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    mailbox, runner, blocks = Mailbox(), ScriptedRunner(), BlockManager(20, 8)
    context = WorkerContext(mailbox, OutputStore(60.0, 100), incarnation=1, vocab_size=1000, clock=lambda: 100.0)
    prefixes = Prefixes(blocks, "f")
    scheduler = DecodeScheduler(
        blocks,
        max_num_seqs=4,
        max_batch_tokens=16,
        max_queue=4,
        max_model_len=100,
        eos_token_ids=frozenset(),
        prefixes=prefixes,
    )
    receiver = KVReceiver(
        incarnation=1,
        layout=LAYOUT,
        fingerprint="f",
        blocks=blocks,
        max_model_len=100,
        max_queue=4,
        max_lease_s=5.0,
        prefixes=prefixes,
    )
    stand_in: Any = runner
    yield Bench(
        DecodeWorker(context, stand_in, blocks, scheduler, receiver, Inlet(stand_in, LAYOUT)), runner, mailbox, blocks
    )
    mailbox.close()


def request(
    request_id: str = "r", *, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 3, logprobs: int | None = None
) -> GenerateRequest:
    return GenerateRequest(
        source=GATEWAY,
        target=1,
        request_id=request_id,
        attempt=0,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, logprobs=logprobs),
    )


def outputs(said: list[Message]) -> list[TokenOutput]:
    return [output for step in said if isinstance(step, StepOutput) for output in step.outputs]


def cached(said: list[Message]) -> list[int]:
    """Of each token that was told, how many tokens of its prompt were cached."""
    return [output.cached_tokens for output in outputs(said)]


def tokens(said: list[Message]) -> list[tuple[int, int, str | None]]:
    return [(output.index, output.token_id, output.finish_reason) for output in outputs(said)]


ABOUT: dict[str, Any] = {"source": GATEWAY, "target": 1, "request_id": "r", "attempt": 0}


def test_tokens_come_once_and_in_order_and_blocks_go_back(bench: Bench) -> None:
    assert tokens(bench.loop(request())) == [(0, 3, None), (1, 4, None), (2, 5, "length")]
    assert bench.blocks.ledger.free == 20


def test_one_message_a_step_for_each_gateway(bench: Bench) -> None:
    said = bench.loop(request("a"), request("b"), steps=1)
    assert len(said) == 1
    assert isinstance(said[0], StepOutput)
    assert [output.request_id for output in said[0].outputs] == ["a", "b"]


def test_a_step_that_fails_ends_its_requests_and_not_the_worker(bench: Bench) -> None:
    bench.runner.fails = True
    said = bench.loop(request("a"), request("b"), steps=3)
    assert [(type(message), message.request_id) for message in said if isinstance(message, RequestFailed)] == [
        (RequestFailed, "a"),
        (RequestFailed, "b"),
    ]
    assert bench.blocks.ledger.free == 20
    bench.runner.fails = False
    assert len(tokens(bench.loop(request("c")))) == 3


def test_the_first_token_tells_what_was_cached_and_the_worker_counts_what_it_computed(bench: Bench) -> None:
    prompt = tuple(range(1, 21))
    assert cached(bench.loop(request("a", prompt=prompt))) == [0, 0, 0]
    assert cached(bench.loop(request("b", prompt=prompt))) == [16, 0, 0]
    assert cached(bench.loop(Resend(**ABOUT | {"request_id": "b"}, sample=0, from_index=0))) == [16, 0, 0]
    assert bench.worker._counters["computed_tokens"] == 20 + 4 + 2 * 2
    assert (bench.blocks.ledger.cached, bench.blocks.ledger.leased) == (2, 0)


def test_sequences_that_are_preempted_are_counted(bench: Bench) -> None:
    bench.blocks.allocate(16)
    said = bench.loop(request("a", max_tokens=20), request("b", max_tokens=20), steps=60)
    assert len(tokens(said)) == 40
    assert bench.worker._status().counters["preempted"] == 1


def test_kv_of_a_step_that_failed_is_not_found_again(bench: Bench) -> None:
    """If what made it fail were cached, every request that begins alike would fail from then on."""
    prompt = tuple(range(1, 21))
    bench.loop(request("a", prompt=prompt))
    bench.runner.fails = True
    assert cached(bench.loop(request("b", prompt=prompt), steps=2)) == []
    assert bench.blocks.ledger.free == 20
    bench.runner.fails = False
    assert cached(bench.loop(request("c", prompt=prompt))) == [0, 0, 0]


def test_an_aborted_request_is_not_computed_again(bench: Bench) -> None:
    bench.loop(request(max_tokens=50), steps=3)
    bench.loop(Abort(**ABOUT), steps=1)
    assert not bench.runner.batches[-1]
    assert bench.blocks.ledger.free == 20


def test_the_requests_of_a_lost_gateway_end_and_those_of_others_go_on(bench: Bench) -> None:
    bench.loop(request("mine", max_tokens=50), steps=2)
    bench.loop(request("theirs", max_tokens=50), gateway=OTHER, steps=2)
    said = bench.loop(GatewayLost(GATEWAY), steps=4)
    assert {output.request_id for step in said if isinstance(step, StepOutput) for output in step.outputs} == {"theirs"}


def test_outputs_are_kept_until_acknowledged(bench: Bench) -> None:
    first = tokens(bench.loop(request()))
    assert tokens(bench.loop(Resend(**ABOUT, sample=0, from_index=1))) == first[1:]
    said = bench.loop(OutputAck(**ABOUT), Resend(**ABOUT, sample=0, from_index=1))
    assert [message.code for message in said if isinstance(message, RequestFailed)] == ["unknown_request"]


def test_logprobs_come_with_each_token_of_who_asks_and_again_when_it_is_told_again(bench: Bench) -> None:
    """The first token's logprobs are lost (TensorRT-LLM PR#11727); only list lengths were tested."""
    said = outputs(bench.loop(request("asks", logprobs=0), request("does not"), steps=30))
    asked = [output for output in said if output.request_id == "asks"]
    assert [output.logprobs for output in asked] == [(-3.0, ()), (-4.0, ()), (-5.0, ())]
    assert {output.logprobs for output in said if output.request_id != "asks"} == {None}
    assert outputs(bench.loop(Resend(**ABOUT | {"request_id": "asks"}, sample=0, from_index=0))) == asked


def test_a_first_token_that_came_with_its_kv_is_told_again_with_its_logprobs(bench: Bench) -> None:
    first = TokenLogprobs(-0.5)
    sequence = Sequence(
        key=RequestKey("r", 0),
        sample=0,
        gateway=GATEWAY,
        params=SamplingParams(max_tokens=2, logprobs=0),
        token_ids=[5, 6, 9],
        num_prompt_tokens=2,
        block_table=bench.blocks.allocate(1),
        num_computed_tokens=2,
        logprobs=first,
    )
    bench.worker._adopt(Adopt(sequence, peer=2, begun_at=0.0))
    assert [output.index for output in outputs(bench.loop())] == [1]
    again = outputs(bench.loop(Resend(**ABOUT, sample=0, from_index=0)))
    assert [output.logprobs for output in again] == [first, TokenLogprobs(-3.0)]


def test_many_tokens_to_tell_again_come_in_several_messages(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.loop(request(max_tokens=7))
    monkeypatch.setattr(kvrelay.worker, "MAX_OUTPUTS", 3)
    said = bench.loop(Resend(**ABOUT, sample=0, from_index=0))
    assert [len(step.outputs) for step in said if isinstance(step, StepOutput)] == [3, 3, 1]
    assert outputs(said) == outputs(first)


def test_what_cannot_be_served_is_refused_with_a_sentence(bench: Bench) -> None:
    said = bench.loop(request("bad", prompt=(1, 5000)), request("long", prompt=(1,) * 100))
    assert [message.code for message in said if isinstance(message, RequestFailed)] == [
        "invalid_request",
        "context_length_exceeded",
    ]


def test_more_than_the_queue_holds_is_refused_and_nothing_is_lost(bench: Bench) -> None:
    said = bench.loop(*(request(str(number), max_tokens=2) for number in range(12)), steps=40)
    refused = [message for message in said if isinstance(message, RequestFailed)]
    assert {message.code for message in refused} == {"overloaded"}
    assert len(tokens(said)) == 2 * (12 - len(refused))


def test_a_worker_that_drains_refuses_offers_that_wait(bench: Bench) -> None:
    bench.loop(*(request(str(number), max_tokens=50) for number in range(4)), steps=1)  # no seat is left
    offer = KVOffer(
        source=2,
        target=1,
        request_id="waits",
        attempt=0,
        prompt_token_ids=(1,),
        params=SamplingParams(max_tokens=3),
        gateway=GATEWAY,
        fingerprint="f",
        layout=LAYOUT,
        lease_s=5.0,
    )
    bench.mailbox.deliver(FromPeer(2, offer))
    bench.loop(steps=1)
    bench.mailbox.deliver(FromGateway(GATEWAY, Drain(source=GATEWAY)))
    assert bench.worker.take_messages(0.0)
    refusals = [order.message for order in bench.mailbox.orders() if isinstance(order, ToPeer)]
    assert [refusal.reason for refusal in refusals if isinstance(refusal, KVRefusal)] == [RefusalReason.DRAINING]


def test_stop_ends_the_loop(bench: Bench) -> None:
    bench.mailbox.deliver(Stop())
    bench.worker.loop()
    assert bench.mailbox.status is None  # nothing was run after the end


def test_blocks_that_leak_are_reported_aloud_once_each_time(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def look() -> int:
        bench.worker._check_ledger(bench.worker._status().ledger)
        return bench.worker._counters["ledger_violation"]

    bench.loop(request(max_tokens=50), steps=2)
    assert look() == 0, "a sequence runs, so blocks are in use"
    bench.loop(Abort(**ABOUT), steps=1)
    assert look() == 0
    leaked = bench.blocks.allocate(2)
    assert (look(), look()) == (1, 1)
    assert [record.message for record in caplog.records if "KV blocks do not add up" in record.message] != []
    bench.blocks.release(leaked)
    assert look() == 1
    bench.blocks._free.pop()
    bench.worker._ledger_fault = False
    assert look() == 2, "a block that is nowhere is a fault whatever runs"
