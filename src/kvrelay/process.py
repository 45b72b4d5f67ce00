"""A worker process: what every role does to start, serve and stop. The role itself is passed in."""

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq

from kvrelay.channel import Listener
from kvrelay.config import WorkerSettings
from kvrelay.control import ControlThread
from kvrelay.errors import AddressInUse
from kvrelay.mailbox import Mailbox
from kvrelay.messages import WorkerHello
from kvrelay.transport import Transport
from kvrelay.types import Incarnation, KVLayout, Role

log = logging.getLogger(__name__)

STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a worker tells others about the model it runs."""

    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    layout: KVLayout
    weights: str
    device: str


def new_incarnation() -> Incarnation:
    """Draws the number that tells this process from every other one, dead or alive; never 0."""
    return secrets.randbits(64) or 1


def advertised(endpoint: str, settings: WorkerSettings) -> str:
    """The address to tell others for a bound `endpoint`; one that is no TCP address is told as it is.

    Raises:
        AddressInUse: bound to every address, but told none of them.
    """
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    told = settings.advertise or host
    if told in ("0.0.0.0", "*", "[::]"):
        raise AddressInUse("--bind takes every address; say with --advertise at which one other workers find this one.")
    return f"tcp://{told}:{port}"


class WorkerProcess:
    """Sockets, mailbox and control thread of one worker, around a compute loop that runs in the calling thread."""

    def __init__(self, settings: WorkerSettings, role: Role, incarnation: Incarnation) -> None:
        """Binds the control address.

        Raises:
            AddressInUse: no port of `--ports` is free.
        """
        self.settings = settings
        self.role = role
        self.incarnation = incarnation
        self.name = settings.name or f"{role.value}-{os.getpid()}"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.mailbox = Mailbox()
        self.listener = Listener(self.context, settings.bind, settings.ports, incarnation=incarnation)

    def serve(self, served: ServedModel, data: Transport, loop: Callable[[], None]) -> int:
        """Registers and runs `loop` until a signal. Returns the exit code: 0, or 1 when the control thread failed.

        Raises:
            AddressInUse: the addresses cannot be told to others, or a gateway address is malformed.
        """
        control = ControlThread(
            context=self.context,
            mailbox=self.mailbox,
            listener=self.listener,
            data=data,
            gateways=self.settings.gateways,
            hello=self._hello(served, data.endpoints),
            heartbeat_s=self.settings.heartbeat_s,
            death_s=self.settings.death_s,
            clock=time.monotonic,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: control.stop())
        thread = threading.Thread(target=control.run, name="control", daemon=True)
        thread.start()
        log.info("%s is up with %s in %s.", self.name, served.name, served.weights)
        try:
            loop()
        finally:
            control.stop()
            thread.join(STOP_S)
            self.mailbox.close()
        return 1 if control.failed else 0

    def _hello(self, served: ServedModel, endpoints: Mapping[str, str]) -> WorkerHello:
        return WorkerHello(
            source=self.incarnation,
            name=self.name,
            role=self.role,
            control_endpoint=advertised(self.listener.endpoint, self.settings),
            data_endpoints={name: advertised(endpoint, self.settings) for name, endpoint in endpoints.items()},
            model=served.name,
            fingerprint=served.fingerprint,
            max_model_len=served.max_model_len,
            vocab_size=served.vocab_size,
            max_num_seqs=self.settings.max_num_seqs,
            layout=served.layout,
            weights=served.weights,
            device=served.device,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
