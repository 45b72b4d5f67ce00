"""NIXL on the same bytes, for the rows of bench/transfer.py. Run by a Python that has nixl; knows nothing of KVRelay.

    python transfer_nixl.py '{"layers": 30, "block_bytes": 12288, "num_blocks": 8, "piece_blocks": 85, "rounds": 7,
                              "digest": false}'

prints one JSON line: the seconds of each hand-over. Two processes with registered memory, NIXL's UCX backend,
which takes whatever UCX finds best unless UCX_TLS says otherwise. All that NIXL can prepare once is prepared before the
first round. A hand-over is: the offer and its grant as notifications, one write of all pieces with a notification, and
the answer as another. Both ends poll, which is what NIXL offers, but let others run in between; NIXL's own progress
thread, which polls as well, is off, since where cores are few it slows everything down a hundred times. With `digest`
each piece is digested before and verified after the write, as KVRelay does.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

Job = dict[str, Any]


def main() -> None:
    """Hands over as often as told, and prints how long each time took."""
    job = json.loads(sys.argv[1])
    here, there = multiprocessing.get_context("spawn").Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(there, job), daemon=True)
    receiver.start()
    seconds = send(here, job)
    receiver.kill()
    receiver.join()
    sys.stdout.write(json.dumps(seconds) + "\n")
    sys.stdout.flush()
    os._exit(0)  # UCX waits at the end for a peer that is gone


class Agent:
    """One end: memory of random bytes, registered, and what it knows of the other end once they have met."""

    def __init__(self, name: str, pipe: Connection, job: Job) -> None:
        num_bytes = job["layers"] * job["num_blocks"] * job["block_bytes"]
        self.memory = np.resize(np.frombuffer(os.urandom(job["block_bytes"] + 1), np.uint8), num_bytes)
        self.nixl = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        base = self.memory.ctypes.data
        self.nixl.register_memory([(base, num_bytes, 0, "")], "DRAM")
        self.pieces = [(base + begin, size, 0) for begin, size in pieces(job)]
        pipe.send((self.nixl.get_agent_metadata(), self.pieces))
        metadata, self.other_pieces = pipe.recv()
        other = self.nixl.add_remote_agent(metadata)
        self.other: str = other.decode() if isinstance(other, bytes) else other
        self._heard: list[bytes] = []

    def say(self, message: bytes) -> None:
        """A notification to the other end."""
        self.nixl.send_notif(self.other, message)

    def hear(self) -> bytes:
        """The next notification."""
        while not self._heard:
            os.sched_yield()
            for messages in self.nixl.get_new_notifs().values():
                self._heard += messages
        return self._heard.pop(0)


def pieces(job: Job) -> Iterator[tuple[int, int]]:
    """Begin and size in bytes of each piece; one lies within a layer, as its memory does."""
    for layer in range(job["layers"]):
        for first in range(0, job["num_blocks"], job["piece_blocks"]):
            count = min(job["piece_blocks"], job["num_blocks"] - first)
            yield (layer * job["num_blocks"] + first) * job["block_bytes"], count * job["block_bytes"]


def digests(memory: memoryview, job: Job) -> bytes:
    """XXH3 of each piece."""
    import xxhash  # the only use, and nixl alone does not bring it

    return b"".join(xxhash.xxh3_64_digest(memory[begin : begin + size]) for begin, size in pieces(job))


def receive(pipe: Connection, job: Job) -> None:
    """The receiving end, until it is killed."""
    agent = Agent("receiver", pipe, job)
    pipe.recv()
    agent.say(b"ready")
    while True:
        if agent.hear() != b"offer":
            raise RuntimeError("An offer was expected.")
        agent.say(b"grant")
        written = agent.hear()
        if job["digest"] and written != digests(agent.memory.data, job):
            raise RuntimeError("A piece arrived damaged.")
        agent.say(b"ack")


def send(pipe: Connection, job: Job) -> list[float]:
    """Seconds of each hand-over."""
    agent = Agent("sender", pipe, job)
    local = agent.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", agent.pieces, "DRAM")
    remote = agent.nixl.prep_xfer_dlist(agent.other, agent.other_pieces, "DRAM")
    indices = np.arange(len(agent.pieces), dtype=np.int32)
    write = agent.nixl.make_prepped_xfer("WRITE", local, indices, remote, indices, b"written")
    pipe.send("both know each other")
    agent.hear()
    seconds = []
    for _ in range(job["rounds"]):
        begin = time.monotonic()
        agent.say(b"offer")
        agent.hear()
        notification = digests(agent.memory.data, job) if job["digest"] else b"written"
        state = agent.nixl.transfer(write, notification)
        while state == "PROC":
            os.sched_yield()
            state = agent.nixl.check_xfer_state(write)
        if state != "DONE":
            raise RuntimeError(f"NIXL reports {state}.")
        agent.hear()
        seconds.append(time.monotonic() - begin)
    return seconds


if __name__ == "__main__":
    main()
