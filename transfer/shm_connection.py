"""The sending end of shared memory: one connection to one receiver, and the memory that came over it.

 connect           memory came
─────────▶ ASKED ──────────────▶ READY
             │ refused, silent     │ closed by the receiver, or by us
             └──────────▶ OVER ◀───┘
"""

import os
import socket
import time

from kvrelay.block_memory import BlockMemory
from kvrelay.errors import WireError
from kvrelay.transfer.shm_frames import MAX_FRAME_BYTES, Address, Hello, boot_id, unpack_geometry
from kvrelay.types import Incarnation

ANSWER_S = 2.0


class ShmConnection:
    """Belongs to the control thread, but for `memory`, which the compute thread reads.

    `memory` is None unless the connection is ready. `blocked` says that the last `send` found no room.
    """

    def __init__(self, address: Address, sender: Incarnation, receiver: Incarnation, name: str) -> None:
        """Connects and asks for the memory of `name`.

        Raises:
            WireError: it is on another host, or does not listen there.
        """
        if address.boot_id != boot_id():
            raise WireError(f"{name} is on another host, so its memory cannot be shared.")
        self.memory: BlockMemory | None = None
        self.blocked = False
        self._name = name
        self._fault = ""
        self._until = time.monotonic() + ANSWER_S
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(address.abstract)
            self._socket.send(Hello(sender, receiver, address.token).pack())
        except OSError as error:
            self._socket.close()
            raise WireError(f"{name} cannot be asked for its memory: {error.strerror}.") from error

    @property
    def descriptors(self) -> list[int]:
        """What to poll."""
        return [] if self._fault else [self._socket.fileno()]

    def ready(self) -> bool:
        """True when the memory is there.

        Raises:
            WireError: it did not come, or the connection is over.
        """
        if self._fault:
            raise WireError(self._fault)
        if self.memory is None and time.monotonic() > self._until:
            raise WireError(self._end(f"{self._name} did not share its memory within {ANSWER_S:g} s."))
        return self.memory is not None

    def hear(self) -> None:
        """Takes the memory when it comes, and notices the end of the connection."""
        while not self._fault:
            try:
                frame, descriptors, _, _ = socket.recv_fds(
                    self._socket, MAX_FRAME_BYTES, 4, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            except OSError as error:
                frame, descriptors = b"", []
                self._lost(error)
            self._take(frame, descriptors)

    def send(self, headers: bytes) -> bool:
        """Tells of pieces that were written. False: it would block.

        Raises:
            WireError: the connection is over.
        """
        if not self.ready():
            return False
        try:
            self._socket.send(headers)
        except BlockingIOError:
            self.blocked = True
            return False
        except OSError as error:
            raise WireError(self._lost(error)) from error
        self.blocked = False
        return True

    def close(self) -> None:
        """Nothing more is written to the memory, but for the piece that may be under way."""
        self._end(f"The connection to {self._name} is closed.")

    def _take(self, frame: bytes, descriptors: list[int]) -> None:
        fault = "" if frame else f"{self._name} does not share its memory with this process."
        if frame and self.memory is None and len(descriptors) == 1:
            try:
                self.memory = BlockMemory.open(unpack_geometry(frame), descriptors.pop())
            except (WireError, OSError) as error:
                fault = f"{self._name} shares no usable memory: {error}"
        elif frame:
            fault = f"{self._name} said something unexpected about its memory."
        for descriptor in descriptors:
            os.close(descriptor)
        if fault:
            self._end(fault)

    def _lost(self, error: OSError) -> str:
        return self._end(f"The memory of {self._name} is not shared any more: {error.strerror}.")

    def _end(self, fault: str) -> str:
        """The first fault is the one that is told."""
        self.memory, self.blocked = None, False
        self._fault = self._fault or fault
        self._socket.close()
        return self._fault
