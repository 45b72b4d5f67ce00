"""One end of UCX in a process of its own: it receives, or sends without end, until it is killed.

It prints `here` and its endpoint, and `moving` once pieces go.
"""

import sys

from kvrelay.messages import Peer
from tests.transfer.device_ends import DeviceEnds
from tests.transfer.plane import NUM_BLOCKS, Ends, meet_peer, poll


def _say(*words: str) -> None:
    sys.stdout.write(f"{' '.join(words)}\n")
    sys.stdout.flush()


def receive(ends: Ends) -> None:
    """Takes whatever comes."""
    end = ends.make()
    _say("here", end.peer.model_dump_json())
    said = False
    while True:
        if end.transport.receive(2**24) and not said:
            said = True
            _say("moving")
        poll(end)


def send(ends: Ends, peer: Peer) -> None:
    """Sends large pieces as fast as they go."""
    end = ends.make()
    _say("here", end.peer.model_dump_json())
    meet_peer(end, peer)
    blocks = tuple(range(NUM_BLOCKS))
    header, payload = end.outlet.take(end.piece(peer, 0, blocks, blocks))
    _say("moving")
    while True:
        while end.transport.send(peer, header, payload):
            continue
        poll(end)
        end.transport.receive(1)


def main() -> None:
    """`receive INCARNATION`, or `send INCARNATION PEER [DEVICE]`, with its KV on a device."""
    word, incarnation, *more = sys.argv[1:]
    if word == "receive":
        receive(Ends("ucx", int(incarnation)))
    ends = DeviceEnds(more[1], int(incarnation)) if more[1:] else Ends("ucx", int(incarnation))
    send(ends, Peer.model_validate_json(more[0]))


if __name__ == "__main__":
    main()
