"""Real workers with a proxy between them that delays, cuts and garbles: right tokens or an error, and no block lost."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvrelay.messages import Abort, RequestFailed, StepOutput, WorkerHello
from kvrelay.types import SamplingParams
from tests.e2e.cluster import wait_for
from tests.e2e.reference import Reference
from tests.e2e.wire import GATEWAY, WireGateway, prefill_request, wire_gateway
from tests.tiny_model import VOCAB, write_tiny_model
from tests.transfer.proxy import Fault, Kind, Proxy

OPTIONS = {"dtype": "float32", "kv_memory": "8M", "threads": 1, "lease_s": 2.0, "transport": "zmq"}
PROMPT_TOKENS, MAX_TOKENS = 200, 8
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32
ROUND_BYTES = {"control": 800, "data": PROMPT_TOKENS * BYTES_PER_TOKEN}  # at least, to the receiver
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
MAX_TRIES = 6  # each takes a lease at most, and ZeroMQ takes 5 s to find a connection that leads nowhere
ROUNDS = 2


@dataclass
class Way:
    """From one worker through two proxies to another."""

    gateway: WireGateway
    reference: Reference
    proxies: dict[str, Proxy]
    draw: random.Random
    num_asked: int = 0

    def ask(self, fault: Fault | None = None, connection: str = "data") -> bool:
        """One request, with a fault on the way: True if it was answered, which must be right; then all is home."""
        self.num_asked += 1
        request_id = f"r{self.num_asked}"
        prompt = [self.draw.randrange(VOCAB - 4) for _ in range(PROMPT_TOKENS)]
        p, d = (self.gateway.hellos[name] for name in "pd")
        endpoints = {"zmq": self.proxies["data"].endpoint}
        update = {"control_endpoint": self.proxies["control"].endpoint, "data_endpoints": endpoints}
        self.proxies[connection].set(fault)
        candidates = (d.model_copy(update=update),)
        self.gateway.send(p, prefill_request(p, candidates, request_id, tuple(prompt), MAX_TOKENS))
        found: dict[int, int] = {}
        failed = wait_for(f"the end of {request_id}", lambda: self._ended(request_id, found))[0]
        if failed:
            self._abort(request_id, p, d)
        else:
            self.reference.check(prompt, PARAMS, [found[index] for index in range(MAX_TOKENS)])
        for worker in (p, d):
            self.gateway.statuses.pop(worker.source, None)
            self.gateway.status(worker, lambda status: status.ledger.leased == status.ledger.revoked == 0)
            assert self.gateway.statuses[worker.source].ledger.conserved
        return not failed

    def _ended(self, request_id: str, found: dict[int, int]) -> list[bool]:
        """Whether it failed, once it has ended."""
        self.gateway.hear()
        while self.gateway.said:
            _, message = self.gateway.said.popleft()
            if isinstance(message, StepOutput):
                outputs = [output for output in message.outputs if output.request_id == request_id]
                found |= {output.index: output.token_id for output in outputs}
            elif isinstance(message, RequestFailed) and message.request_id == request_id:
                return [True]
        return [False] * (len(found) == MAX_TOKENS)

    def _abort(self, request_id: str, *workers: WorkerHello) -> None:
        """What a gateway does when a request has failed."""
        for worker in workers:
            self.gateway.send(worker, Abort(source=GATEWAY, target=worker.source, request_id=request_id, attempt=0))


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    folder = tmp_path_factory.mktemp("proxy")
    model = write_tiny_model(folder / "tiny")
    roles: dict[str, dict[str, object]] = {"p": {"role": "prefill", **OPTIONS}, "d": {"role": "decode", **OPTIONS}}
    with wire_gateway(folder, model, **roles) as gateway:
        d = gateway.hellos["d"]
        proxies = {"control": Proxy(d.control_endpoint), "data": Proxy(d.data_endpoints["zmq"])}
        yield Way(gateway, Reference(str(model), folder / "cache"), proxies, random.Random(1))
        for proxy in proxies.values():
            proxy.close()


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("connection", ["control", "data"])
def test_a_fault_between_two_workers(way: Way, connection: str, kind: Kind) -> None:
    for _ in range(ROUNDS):
        before = way.proxies[connection].num_struck
        skip, noise = way.draw.randrange(ROUND_BYTES[connection]), bytes([1 << way.draw.randrange(8)])
        way.ask(Fault(kind, to_server=True, skip=skip, noise=noise, delay_s=0.2), connection)
        assert way.proxies[connection].num_struck == before + 1
        if kind is Kind.GARBLE:
            way.proxies[connection].cut()  # ZeroMQ waits for ever for the rest of a frame whose length is another
        assert any(way.ask() for _ in range(MAX_TRIES))
