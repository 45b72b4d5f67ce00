"""Real workers hand KV over by each transport, and by the best that both of a pair have."""

from pathlib import Path

from kvrelay.messages import RequestFailed
from tests.e2e.wire import WireGateway, prefill_request, wire_gateway
from tests.tiny_model import write_tiny_model

OPTIONS = {"dtype": "float32", "kv_memory": "8M", "threads": 1, "lease_s": 5.0}
PROMPT = tuple(range(43))


def hand_over(folder: Path, prefill: str, *decode: str) -> tuple[list[list[int]], WireGateway]:
    """The tokens that each decode worker gives after a hand-over. Names are `--transport`."""
    model = write_tiny_model(folder / "tiny")
    roles: dict[str, dict[str, object]] = {
        "p": {"role": "prefill", **OPTIONS, "max_batch_tokens": 16, "transport": prefill}
    }
    roles |= {f"d{i}": {"role": "decode", **OPTIONS, "transport": name} for i, name in enumerate(decode)}
    with wire_gateway(folder, model, **roles) as gateway:
        tokens = []
        for i, name in enumerate(decode):
            p, d = gateway.hellos["p"], gateway.hellos[f"d{i}"]
            assert list(d.data_endpoints) == (["shm", "zmq", "ucx"] if name == "auto" else [name])
            gateway.send(p, prefill_request(p, (d,), f"r{i}", PROMPT, 8))
            tokens.append(gateway.tokens(f"r{i}", 8))
        for hello in gateway.hellos.values():
            gateway.status(hello, lambda status: status.ledger.leased == status.ledger.revoked == 0)
            gateway.statuses.pop(hello.source)
            gateway.status(hello, lambda _: True)
    return tokens, gateway


def counted(gateway: WireGateway, name: str, counter: str) -> int:
    return gateway.statuses[gateway.hellos[name].source].counters.get(counter, 0)


def test_each_pair_uses_the_best_that_both_have(tmp_path: Path) -> None:
    tokens, gateway = hand_over(tmp_path, "auto", "auto", "shm", "zmq", "ucx")
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    for name, used, unused in (("d0", "shm", "zmq"), ("d1", "shm", "zmq"), ("d2", "zmq", "shm"), ("d3", "ucx", "shm")):
        assert counted(gateway, name, f"{used}_pieces_received") >= 3  # layers
        assert counted(gateway, name, f"{unused}_pieces_received") == 0
    assert [counted(gateway, "p", f"{name}_agreed") for name in ("shm", "zmq", "ucx")] == [2, 1, 1]
    pairs = (("d0", "shm"), ("d2", "zmq"), ("d3", "ucx"))
    received = [counted(gateway, name, f"{used}_bytes_received") for name, used in pairs]
    assert received[0] == received[1] == received[2] > 0


def test_one_that_is_forced_is_used_from_the_first_hand_over_on(tmp_path: Path) -> None:
    _, gateway = hand_over(tmp_path, "shm", "auto")
    assert counted(gateway, "d0", "shm_pieces_received") >= 3


def test_a_pair_without_a_common_transport_ends_in_an_error(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    with wire_gateway(
        tmp_path,
        model,
        p={"role": "prefill", **OPTIONS, "transport": "shm"},
        d={"role": "decode", **OPTIONS, "transport": "zmq"},
    ) as gateway:
        p, d = gateway.hellos["p"], gateway.hellos["d"]
        gateway.send(p, prefill_request(p, (d,), "r", PROMPT, 8))
        assert gateway.next(RequestFailed, "r").code == "worker_lost"
    assert "No transport reaches d. d does not share memory." in (tmp_path / "p.log").read_text()
