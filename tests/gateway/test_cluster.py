"""What the gateway knows about its workers."""

import json

import pytest

from kvrelay.gateway.cluster import Cluster
from kvrelay.messages import WorkerHello
from kvrelay.types import Role
from tests.gateway.nouns import FINGERPRINT, MODEL, hello, layout, status


def cluster(*hellos: WorkerHello) -> Cluster:
    result = Cluster(MODEL, FINGERPRINT, death_s=2.0)
    for each in hellos:
        result.on_hello(each, 0.0)
    return result


def why(of: Cluster, incarnation: int) -> str:
    worker = of.get(incarnation)
    assert worker is not None
    return of.why_unused(worker)


def test_an_empty_cluster_says_what_to_do() -> None:
    empty = cluster()
    assert not empty.ready
    assert "No worker has registered" in empty.why_not_ready
    assert empty.max_model_len == 0


def test_a_pair_serves_and_half_a_pair_waits() -> None:
    half = cluster(hello(1, Role.PREFILL))
    assert not half.ready
    assert why(half, 1) == "It waits for a decode worker."
    assert half.why_not_ready == "No worker can serve yet. prefill-1 waits for a decode worker."
    half.on_hello(hello(2, Role.DECODE), 0.0)
    assert half.ready
    assert half.why_not_ready == why(half, 1) == why(half, 2) == ""


def test_a_colocated_worker_serves_alone() -> None:
    assert cluster(hello(1, Role.BOTH)).ready


def test_a_worker_with_another_model_is_not_used() -> None:
    mixed = cluster(hello(1, Role.PREFILL), hello(2, Role.DECODE, fingerprint="0" * 64))
    assert not mixed.ready
    assert why(mixed, 2).startswith("It serves tiny (000000000000), but this gateway serves tiny (ffffffffffff)")
    assert why(mixed, 1) == "It waits for a decode worker."


def test_workers_with_different_kv_layouts_are_no_pair() -> None:
    mixed = cluster(hello(1, Role.PREFILL), hello(2, Role.DECODE, kv=layout(block_size=24)))
    assert not mixed.ready
    fault = "The sender's KV blocks hold 16 tokens, the receiver's 24: one must be a multiple of the other"
    assert why(mixed, 1).startswith(f"It fits no decode worker. {fault}")
    assert why(mixed, 2).startswith(f"It fits no prefill worker. {fault}")
    assert f"prefill-1 fits no decode worker. {fault}" in mixed.why_not_ready
    mixed.on_hello(hello(3, Role.DECODE), 0.0)
    assert [[peer.incarnation for peer in peers] for _, peers in mixed.pairs()] == [[3]]
    assert why(mixed, 1) == ""
    assert why(mixed, 2) != ""


def test_workers_with_kv_of_different_types_are_no_pair() -> None:
    mixed = cluster(hello(1, Role.PREFILL), hello(2, Role.DECODE, kv=layout(dtype="int8")))
    assert "tokens, float32, the receiver's" in mixed.why_not_ready
    assert "tokens, int8; start both with the same --dtype and --kv-cache-dtype." in mixed.why_not_ready


@pytest.mark.parametrize("block_size", [8, 32])
def test_blocks_of_another_size_that_fits_are_converted_but_not_in_shared_memory(block_size: int) -> None:
    other = hello(2, Role.DECODE, kv=layout(block_size=block_size))
    assert cluster(hello(1, Role.PREFILL), other).ready
    shared = {"data_endpoints": {"shm": "boot/name/token"}}
    forced = cluster(hello(1, Role.PREFILL), other.model_copy(update=shared))
    forced.on_hello(hello(1, Role.PREFILL).model_copy(update=shared), 0.0)
    assert not forced.ready
    assert "or with --transport auto" in why(forced, 1)
    forced.on_hello(hello(2, Role.DECODE).model_copy(update=shared), 0.0)
    assert forced.ready


def test_workers_without_a_common_transport_are_no_pair() -> None:
    """Requests for them could only fail."""
    shared = {"data_endpoints": {"shm": "boot/name/token"}}
    apart = cluster(hello(1, Role.PREFILL).model_copy(update=shared), hello(2, Role.DECODE))
    assert not apart.ready
    fault = "The sender has transport shm, the receiver zmq: none in common; start both with the same --transport"
    assert why(apart, 1).startswith(f"It fits no decode worker. {fault}")
    apart.on_hello(hello(3, Role.DECODE).model_copy(update=shared), 0.0)
    assert [[peer.incarnation for peer in peers] for _, peers in apart.pairs()] == [[3]]


def test_workers_with_weights_of_other_precisions_are_no_pair() -> None:
    """What is computed from one's KV would depend on who computed it."""
    mixed = cluster(
        hello(1, Role.PREFILL).model_copy(update={"weights": "bf16"}),
        hello(2, Role.DECODE).model_copy(update={"weights": "int4+int8"}),
    )
    assert not mixed.ready
    assert "weights in bf16, the receiver in int4+int8; start both with the same --quant" in mixed.why_not_ready


def test_a_draining_worker_gets_nothing_new() -> None:
    leaving = cluster(hello(1, Role.PREFILL), hello(2, Role.DECODE))
    leaving.on_status(status(2, draining=True), 0.5)
    assert not leaving.ready
    assert why(leaving, 2) == "It is draining."


def test_silence_is_death() -> None:
    silent = cluster(hello(1, Role.PREFILL), hello(2, Role.DECODE))
    assert silent.on_status(status(1), 1.5)
    silent.on_heard(2, 1.0)
    assert silent.tick(2.9) == []
    assert [loss.incarnation for loss in silent.tick(3.1)] == [2]
    assert silent.tick(3.2) == []
    assert not silent.ready
    assert silent.snapshot(4.0)["lost"][0]["reason"] == "it was silent for more than 2 s"


def test_one_that_was_silent_must_introduce_itself_again() -> None:
    silent = cluster(hello(1, Role.BOTH))
    silent.tick(9.0)
    assert not silent.on_status(status(1), 9.1)
    assert not silent.ready
    silent.on_hello(hello(1, Role.BOTH), 9.2)
    assert silent.ready


def test_a_lost_connection_is_death_at_once() -> None:
    lost = cluster(hello(1, Role.BOTH))
    assert lost.on_lost(1, 1.0)
    assert not lost.on_lost(1, 1.0)
    assert not lost.ready


def test_a_restarted_worker_replaces_the_dead_one_at_its_address() -> None:
    restarted = cluster(hello(1, Role.BOTH, port=7000))
    (loss,) = restarted.on_hello(hello(2, Role.BOTH, port=7000), 1.0)
    assert loss.incarnation == 1
    assert 1 not in restarted
    assert restarted.on_hello(hello(2, Role.BOTH, port=7000), 1.0) == []


def test_an_introduction_repeated_keeps_the_status() -> None:
    repeated = cluster(hello(1, Role.PREFILL), hello(2, Role.DECODE))
    repeated.on_status(status(2, draining=True), 0.5)
    repeated.on_hello(hello(2, Role.DECODE), 0.6)
    assert not repeated.ready


def test_the_longest_request_is_what_some_pair_can_hold() -> None:
    pair = cluster(hello(1, Role.PREFILL, max_model_len=512), hello(2, Role.DECODE, max_model_len=128))
    assert pair.max_model_len == 128
    pair.on_hello(hello(3, Role.DECODE, max_model_len=2048), 0.0)
    assert pair.max_model_len == 512
    pair.on_hello(hello(4, Role.BOTH, max_model_len=1024), 0.0)
    assert pair.max_model_len == 1024


def test_the_snapshot_shows_every_block() -> None:
    shown = cluster(hello(1, Role.PREFILL), hello(2, Role.DECODE))
    shown.on_status(status(2), 1.0)
    snapshot = json.loads(json.dumps(shown.snapshot(1.5)))
    first, second = snapshot["workers"]
    assert snapshot["ready"]
    assert first["ledger"] is None
    assert second["ledger"] == {"total": 10, "free": 6, "cached": 0, "leased": 4, "revoked": 0, "conserved": True}
    assert (second["name"], second["role"], second["incarnation"]) == ("decode-2", "decode", "0" * 15 + "2")
    assert second["heartbeat_age_s"] == 0.5
    assert second["counters"] == {"stale_message": 3}
    assert second["usable"]


def test_the_snapshot_names_transports_and_keeps_their_addresses_which_hold_secrets() -> None:
    endpoints = {"shm": "boot/name/5ec4e7", "zmq": "tcp://127.0.0.1:9"}
    shown = cluster(hello(1, Role.DECODE).model_copy(update={"data_endpoints": endpoints}))
    assert shown.workers[0].peer.data_endpoints == endpoints  # those who send KV are told
    snapshot = shown.snapshot(1.5)
    assert snapshot["workers"][0]["transports"] == ["shm", "zmq"]
    assert "5ec4e7" not in json.dumps(snapshot)
