"""How a worker's KV travels, from its settings: the transports it offers, and the ports of its memory."""

import logging
from dataclasses import dataclass

import zmq

from kvrelay.block_memory import BlockMemory
from kvrelay.config import WorkerSettings
from kvrelay.errors import TransportMissing
from kvrelay.transfer.ports import Inlet, KVMemory, Outlet
from kvrelay.transfer.shm_transport import ShmTransport
from kvrelay.transfer.transports import Transports
from kvrelay.transfer.zmq_transport import ZmqTransport
from kvrelay.transport import Transport
from kvrelay.types import Incarnation, KVLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataPlane:
    """`transport` is the control thread's, the ports are the compute thread's."""

    transport: Transport
    outlet: Outlet
    inlet: Inlet


def open_data_plane(
    settings: WorkerSettings,
    context: "zmq.Context[zmq.Socket[bytes]]",
    incarnation: Incarnation,
    memory: KVMemory,
    layout: KVLayout,
    host: BlockMemory | None,
) -> DataPlane:
    """Starts what `--transport` asks for. `layout` is the memory's; `host` is what lies behind it, None if it is on a
    device.

    Raises:
        TransportMissing: the one asked for cannot work here.
        AddressInUse: no port of `--ports` is free.
    """
    shm = None if settings.transport == "zmq" else _start_shm(settings, incarnation, host)
    carrying: list[Transport] = []
    if settings.transport != "shm":
        carrying.append(ZmqTransport(context, settings.bind, settings.ports, incarnation=incarnation))
    shared = (lambda _: None) if shm is None else shm.shared
    return DataPlane(Transports([] if shm is None else [shm], carrying), Outlet(memory, shared), Inlet(memory, layout))


def _start_shm(settings: WorkerSettings, incarnation: Incarnation, host: BlockMemory | None) -> ShmTransport | None:
    try:
        if host is None:
            raise OSError(0, "KV memory of a device cannot be shared")
        return ShmTransport(host, incarnation=incarnation)
    except OSError as error:
        sentence = f"Transport shm cannot be used here: {error.strerror}"
        if settings.transport == "shm":
            raise TransportMissing(f"{sentence}; choose another one with --transport.") from error
        log.warning("%s; zmq is used.", sentence)
        return None
