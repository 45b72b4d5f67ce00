"""Where requests go."""

import pytest

from kvrelay.errors import ContextLengthExceeded, NoWorkers
from kvrelay.gateway.cluster import Cluster
from kvrelay.gateway.router import MAX_CANDIDATES, Route, Router
from kvrelay.messages import WorkerHello, WorkerLoad
from kvrelay.types import Role
from tests.gateway.nouns import FINGERPRINT, MODEL, hello, layout, status


def cluster(*hellos: WorkerHello) -> Cluster:
    result = Cluster(MODEL, FINGERPRINT, death_s=2.0)
    for each in hellos:
        result.on_hello(each, 0.0)
    return result


def two_by_two() -> Cluster:
    return cluster(hello(1, Role.PREFILL), hello(2, Role.PREFILL), hello(3, Role.DECODE), hello(4, Role.DECODE))


def send(router: Router, where: Route, num_tokens: int) -> None:
    router.add(where.first, prompt_tokens=num_tokens)
    router.add(where.candidates[0].incarnation if where.candidates else where.first, sequences=1)


def test_two_equal_workers_get_equal_queues_while_statuses_are_stale() -> None:
    """Elsewhere queues of 83 and 0 were seen on two equal prefill workers."""
    router, workers = Router(), two_by_two()
    for incarnation in (1, 2, 3, 4):
        router.on_status(status(incarnation))
    for _ in range(84):
        send(router, router.choose(workers, 10), 10)
    assert [router.own(incarnation).prompt_tokens for incarnation in (1, 2)] == [420, 420]
    assert [router.own(incarnation).sequences for incarnation in (3, 4)] == [42, 42]


def test_a_long_prompt_counts_more_than_short_ones() -> None:
    router, workers = Router(), two_by_two()
    long_at = router.choose(workers, 200).first
    router.add(long_at, prompt_tokens=200)
    others = set()
    for _ in range(5):
        where = router.choose(workers, 10)
        router.add(where.first, prompt_tokens=10)
        others.add(where.first)
    assert others == {3 - long_at}


def test_equals_take_turns() -> None:
    router, workers = Router(), two_by_two()
    routes = [router.choose(workers, 10) for _ in range(4)]
    assert [where.first for where in routes] in ([1, 2, 1, 2], [2, 1, 2, 1])
    assert len({where.candidates[0].incarnation for where in routes}) == 2


def test_every_decode_worker_is_a_candidate_least_loaded_first() -> None:
    router, workers = Router(), two_by_two()
    router.add(3, sequences=2)
    for _ in range(3):
        assert [peer.incarnation for peer in router.choose(workers, 10).candidates] == [4, 3]


def test_load_is_relative_to_what_a_worker_can_run() -> None:
    router = Router()
    workers = cluster(
        hello(1, Role.PREFILL), hello(3, Role.DECODE, max_num_seqs=4), hello(4, Role.DECODE, max_num_seqs=64)
    )
    router.add(3, sequences=2)
    router.add(4, sequences=3)
    assert router.choose(workers, 10).candidates[0].incarnation == 4


def test_candidates_are_bounded() -> None:
    workers = cluster(hello(1, Role.PREFILL), *(hello(100 + number, Role.DECODE) for number in range(20)))
    assert len(Router().choose(workers, 10).candidates) == MAX_CANDIDATES


def test_work_of_other_gateways_counts() -> None:
    router, workers = Router(), two_by_two()
    router.on_status(status(1, load=WorkerLoad(num_waiting_tokens=1000)))
    router.on_status(status(3, load=WorkerLoad(num_running=5)))
    for _ in range(3):
        where = router.choose(workers, 10)
        assert where.first == 2
        assert where.candidates[0].incarnation == 4
    router.on_lost(1)
    assert {router.choose(workers, 10).first for _ in range(2)} == {1, 2}


def test_own_work_is_not_counted_twice() -> None:
    router, workers = Router(), two_by_two()
    router.add(1, prompt_tokens=100)
    router.on_status(status(1, load=WorkerLoad(num_waiting_tokens=100)))
    router.add(1, prompt_tokens=-100)
    router.add(2, prompt_tokens=1)
    assert router.choose(workers, 10).first == 1
    assert not router.idle
    router.add(2, prompt_tokens=-1)
    assert router.idle


def test_a_pair_is_preferred_and_a_colocated_worker_serves_alone() -> None:
    router = Router()
    mixed = cluster(hello(1, Role.PREFILL), hello(2, Role.DECODE), hello(3, Role.BOTH))
    assert router.choose(mixed, 10).first == 1
    mixed.on_lost(2, 1.0)
    where = router.choose(mixed, 10)
    assert (where.first, where.local, where.workers) == (3, True, (3,))


def test_colocated_workers_share_the_work() -> None:
    router, workers = Router(), cluster(hello(1, Role.BOTH), hello(2, Role.BOTH))
    for _ in range(10):
        send(router, router.choose(workers, 10), 10)
    assert router.own(1).sequences == router.own(2).sequences == 5


def test_no_pair_is_made_of_different_layouts() -> None:
    workers = cluster(
        hello(1, Role.PREFILL),
        hello(2, Role.PREFILL, kv=layout(32)),
        hello(3, Role.DECODE),
        hello(4, Role.DECODE, kv=layout(32)),
    )
    router = Router()
    routes = [router.choose(workers, 10) for _ in range(4)]
    assert {(where.first, where.candidates[0].incarnation) for where in routes} == {(1, 3), (2, 4)}


def test_no_workers_is_said_with_the_reason() -> None:
    with pytest.raises(NoWorkers, match="waits for a decode worker"):
        Router().choose(cluster(hello(1, Role.PREFILL)), 10)


def test_a_prompt_that_fits_nowhere_is_refused_with_both_numbers() -> None:
    workers = two_by_two()
    Router().choose(workers, 255)
    with pytest.raises(ContextLengthExceeded, match=r"256 tokens.*context of 256") as refused:
        Router().choose(workers, 256, param="messages")
    assert refused.value.param == "messages"


def test_a_long_prompt_goes_where_it_fits() -> None:
    workers = cluster(
        hello(1, Role.PREFILL, max_model_len=2048),
        hello(2, Role.PREFILL, max_model_len=64),
        hello(3, Role.DECODE, max_model_len=2048),
        hello(4, Role.DECODE, max_model_len=64),
    )
    router = Router()
    for _ in range(4):
        where = router.choose(workers, 1000)
        assert (where.first, [peer.incarnation for peer in where.candidates]) == (1, [3])


def test_a_long_prompt_goes_to_a_colocated_worker_if_no_pair_can_hold_it() -> None:
    workers = cluster(
        hello(1, Role.PREFILL, max_model_len=2048),
        hello(2, Role.DECODE, max_model_len=64),
        hello(3, Role.BOTH, max_model_len=2048),
    )
    assert Router().choose(workers, 1000).first == 3
