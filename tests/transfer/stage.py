"""What the processes of a world share: time, the network, and the gateway, which knows the fate of every request."""

from collections import Counter
from collections.abc import Iterable

from kvrelay.messages import Abort
from kvrelay.transfer.protocol.actions import Failed
from kvrelay.types import RequestKey
from tests.transfer.network import Network
from tests.transfer.nouns import GATEWAY, LAYOUT

Memory = dict[tuple[int, int], bytes]  # (layer, block id) -> one block of one layer


class Fates:
    """The gateway's book: every request ends once, and no attempt is both failed and adopted."""

    def __init__(self, log: Counter[str]) -> None:
        self._log = log
        self.attempt_of: dict[str, int] = {}
        self.prefill_of: dict[RequestKey, int] = {}
        self.open: set[str] = set()  # requests that the gateway has not ended
        self.endings: Counter[str] = Counter()
        self.adopted: Counter[RequestKey] = Counter()
        self._failed: set[RequestKey] = set()
        self._failed_by_digest: set[RequestKey] = set()

    def begin(self, key: RequestKey, prefill: int) -> None:
        """A new attempt; `prefill` is the incarnation that computes it."""
        self.attempt_of[key.request_id] = key.attempt
        self.prefill_of[key] = prefill
        self.open.add(key.request_id)

    def end(self, request_id: str, why: str) -> None:
        """A request ends once; what comes later is ignored."""
        if request_id in self.open:
            self.open.remove(request_id)
            self.endings[request_id] += 1
            self._log[f"ended: {why}"] += 1

    def is_newest(self, key: RequestKey) -> bool:
        """The gateway has made no attempt after this one."""
        return self.attempt_of[key.request_id] == key.attempt

    def note_adopted(self, key: RequestKey, peer: int) -> None:
        """A decode worker goes on with an attempt that came from `peer`."""
        assert self.prefill_of[key] == peer
        assert key not in self._failed - self._failed_by_digest, f"{key} was adopted after it failed"
        self.adopted[key] += 1
        assert self.adopted[key] == 1, f"{key} was adopted twice"
        self._log["adopted"] += 1

    def note_failed(self, failed: Failed) -> None:
        """A worker gives an attempt up."""
        assert failed.gateway == GATEWAY
        if "damaged" in failed.message:
            self._failed_by_digest.add(failed.key)
        hit = self.adopted[failed.key] and failed.key not in self._failed_by_digest
        assert not hit, f"{failed} after it was adopted"
        self._failed.add(failed.key)
        if self.is_newest(failed.key):
            self.end(failed.key.request_id, failed.code)


class Stage:
    """`one_sided`: most senders write into the receivers' memory by themselves; those born later may not."""

    def __init__(self, network: Network, *, one_sided: bool) -> None:
        self.one_sided = one_sided
        self.network = network
        self.now = 100.0
        self.log: Counter[str] = Counter()
        self.fates = Fates(self.log)
        self._next_incarnation = 1000

    def new_incarnation(self) -> int:
        """Of a process that is born now."""
        self._next_incarnation += 1
        return self._next_incarnation

    def is_writer(self, incarnation: int) -> bool:
        """This sender can write into the receivers' memory by itself."""
        return self.one_sided and incarnation % 5 != 0

    def say_abort(self, key: RequestKey, names: Iterable[str]) -> None:
        """The gateway tells the workers of these names that an attempt is over."""
        abort = Abort(source=GATEWAY, target=0, request_id=key.request_id, attempt=key.attempt)
        for name in names:
            self.network.say(GATEWAY, name, abort, self.now)


def wipe(memory: Memory, block_ids: Iterable[int], filler: bytes) -> None:
    """Every layer of these blocks holds nothing but `filler`."""
    for block_id in block_ids:
        memory.update({(layer, block_id): filler * LAYOUT.block_bytes for layer in range(LAYOUT.num_layers)})
