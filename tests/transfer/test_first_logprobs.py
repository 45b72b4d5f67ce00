"""The logprobs of first tokens travel with the Commit, so that whoever tells the token again tells them too."""

from kvrelay.errors import HandOverFailed
from kvrelay.messages import KVCommit, KVGrant, LeaseId
from kvrelay.transfer.protocol.actions import Action, Adopt, Failed
from kvrelay.types import RequestKey, SamplingParams, TokenLogprobs, TopLogprob
from tests.transfer.nouns import LAYOUT, NUM_BLOCKS, messages, new_peer, new_sender, new_sequence, of
from tests.transfer.test_receiver import Bench

P, D = 1, 50
FIRST = TokenLogprobs(-0.25, (TopLogprob(9, -0.25), TopLogprob(4, -1.5)))


def commit(num_logprobs: int | None, *told: TokenLogprobs) -> tuple[Bench, list[Action]]:
    """A hand-over whose KV has arrived, of a request that asks for so many, and the Commit that tells these."""
    bench = Bench()
    bench.offer(source=P, params=SamplingParams(max_tokens=4, logprobs=num_logprobs))
    (lease,) = messages(bench.grant(), KVGrant)
    bench.land_all(lease)
    about = {"source": lease.target, "target": lease.source, "request_id": lease.request_id, "attempt": lease.attempt}
    said = KVCommit(**about, lease_id=lease.lease_id, first_token_ids=(9,), first_logprobs=told)
    return bench, bench.receiver.on_message(said.source, said, now=0.0)


def test_the_sequence_that_decodes_has_those_of_its_first_token() -> None:
    _, actions = commit(2, FIRST)
    assert [adopt.sequence.logprobs for adopt in of(actions, Adopt)] == [FIRST]
    _, actions = commit(None)
    assert [adopt.sequence.logprobs for adopt in of(actions, Adopt)] == [None]


def test_a_commit_without_the_logprobs_asked_for_fails_visibly() -> None:
    for asked, told in ((2, ()), (2, (FIRST, FIRST)), (None, (FIRST,))):
        bench, actions = commit(asked, *told)
        assert [failed.code for failed in of(actions, Failed)] == [HandOverFailed.code]
        assert bench.state == (NUM_BLOCKS, 0, 0)


def test_a_sender_tells_those_of_its_sequence() -> None:
    for told, expected in ((FIRST, (FIRST,)), (None, ())):
        sender, key = new_sender(P), RequestKey("r", 1)
        sequence = new_sequence(key, LAYOUT.block_size, block_table=(0,))
        sender.offer(sequence, (new_peer(D),), 1, now=0.0)
        grant = KVGrant(
            source=D,
            target=P,
            request_id="r",
            attempt=1,
            lease_id=LeaseId(D, 1),
            block_ids=(0,),
            block_size=LAYOUT.block_size,
        )
        sender.on_message(D, grant, now=0.0)
        sequence.logprobs = told
        sender.commit(key, (9,), now=0.0)
        (said,) = messages(sender.next_pieces(2**20, now=0.0), KVCommit)
        assert said.first_logprobs == expected
