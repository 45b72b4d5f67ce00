"""Ends of UCX in this process, and ends that a test plays itself."""

import socket
from collections.abc import Callable

from kvrelay.errors import WireError
from kvrelay.messages import Peer
from kvrelay.transfer.ucx_frames import PROBE, TAKEN, Stream, Welcome, pack_hello, tag
from kvrelay.transfer.ucx_transport import MAX_FRAME_BYTES, MAX_QUEUED_PIECES, UcxTransport
from kvrelay.transfer.ucx_worker import UcxWorker
from tests.transfer.plane import End, Ends, poll, tries

STRANGER = 77


def narrow(
    ends: Ends, like: End, max_frame_bytes: int = MAX_FRAME_BYTES, max_queued: int = MAX_QUEUED_PIECES
) -> tuple[End, UcxTransport]:
    """One more end, with other bounds and another's memory."""
    made = UcxTransport("127.0.0.1", "0", incarnation=9, max_frame_bytes=max_frame_bytes, max_queued=max_queued)
    ends.stack.callback(made.close)
    return End(9, like.memory, made, like.outlet, like.inlet), made


def port_of(end: End) -> int:
    return int(end.transport.endpoints["ucx"].rpartition(":")[2])


def raw(ends: Ends, end: End) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port_of(end)), timeout=10)
    ends.stack.callback(made.close)
    return made


def wait_for(check: Callable[[], bool], *ends: End) -> None:
    for _ in tries():
        for end in ends:
            end.transport.receive(2**20)
        if check():
            return
        poll(*ends)
    raise AssertionError("it never happened")


def fault(end: End, incarnation: int, *others: End) -> str:
    """Why nothing goes to a peer."""
    reasons: list[str] = []

    def failed() -> bool:
        try:
            end.transport.ready(incarnation)
        except WireError as error:
            reasons.append(str(error))
        return bool(reasons)

    wait_for(failed, end, *others)
    return reasons[0]


def listen(ends: Ends) -> tuple[socket.socket, Peer]:
    """A receiver that the test plays itself."""
    made = socket.create_server(("127.0.0.1", 0))
    ends.stack.callback(made.close)
    made.settimeout(10)
    address = f"tcp://127.0.0.1:{made.getsockname()[1]}"
    return made, Peer(name="liar", incarnation=STRANGER, control_endpoint="tcp://h:1", data_endpoints={"ucx": address})


def accept(ends: Ends, listener: socket.socket) -> socket.socket:
    made, _ = listener.accept()
    ends.stack.callback(made.close)
    made.settimeout(10)
    return made


class Stranger:
    """A sender that the test plays itself, welcomed by the receiver."""

    def __init__(self, ends: Ends, receiver: End) -> None:
        self.stream = Stream(raw(ends, receiver))
        self._receiver = receiver
        self._worker = UcxWorker("127.0.0.1", range(1))
        ends.stack.callback(self._worker.close)
        self._welcomes: list[Welcome] = []
        self.wait_for(self._welcomed)
        self._endpoint = self._worker.connect(self._welcomes[0].address)
        ends.stack.callback(self._worker.disconnect, self._endpoint)

    def wait_for(self, check: Callable[[], bool]) -> None:
        wait_for(lambda: self._step() or check(), self._receiver)

    def send(self, number: int, payload: bytes, *, on_device: bool = False) -> None:
        """Until it is on its way."""
        name = tag(self._welcomes[0].connection, number, on_device=on_device)
        sent = self._worker.send(self._endpoint, name, payload)
        self.wait_for(lambda: sent.done)

    def _welcomed(self) -> bool:
        self._welcomes += filter(None, [self.stream.take_welcome()])
        return bool(self._welcomes)

    def _step(self) -> bool:
        self._worker.progress()
        self.stream.hear(2**16)
        return False

    def let_in(self) -> None:
        """Says what a sender should."""
        self.stream.send(pack_hello(STRANGER, self._receiver.incarnation))
        self.send(0, PROBE)
        self.wait_for(lambda: self.stream.take(1) == TAKEN)
