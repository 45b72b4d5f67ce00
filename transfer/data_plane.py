"""How a worker's KV travels, from its settings: the transports it offers, and the ports of its memory."""

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import zmq

from kvrelay.block_memory import BlockMemory
from kvrelay.config import WorkerSettings
from kvrelay.device_memory import DeviceMemory
from kvrelay.errors import TransportMissing
from kvrelay.transfer.ports import Inlet, KVMemory, Outlet
from kvrelay.transfer.scratch import keep_freed_memory
from kvrelay.transfer.shm_transport import ShmTransport
from kvrelay.transfer.transports import Transports
from kvrelay.transfer.ucx_transport import UcxTransport
from kvrelay.transfer.ucx_worker import has_rdma
from kvrelay.transfer.zmq_transport import ZmqTransport
from kvrelay.transport import Transport
from kvrelay.types import Incarnation, KVLayout

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Transport)


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
    device: DeviceMemory | None = None,
) -> DataPlane:
    """Starts what `--transport` asks for. `layout` is the memory's; what lies behind it is `host`, or `device` if it is
    on one.

    Raises:
        TransportMissing: the one asked for cannot work here.
        AddressInUse: no port of `--ports` is free.
    """

    def start_shm() -> ShmTransport:
        if host is None:
            raise OSError(0, "KV memory of a device cannot be shared")
        return ShmTransport(host, incarnation=incarnation)

    def start_ucx() -> UcxTransport:
        room = None if device is None else device.room
        made = UcxTransport(settings.bind, settings.ports, incarnation=incarnation, room=room)
        if device is not None and not made.on_device:
            log.info("UCX finds no CUDA here (`ucx_info -d` lists what it finds); KV goes through the host's memory.")
        return made

    carrying: list[Transport] = []
    keep_freed_memory()
    if settings.transport in ("auto", "zmq"):  # first, since it needs its port most
        carrying.append(ZmqTransport(context, settings.bind, settings.ports, incarnation=incarnation))
    ucx = _start("ucx", settings, start_ucx)
    if ucx is not None:
        carrying.insert(0 if has_rdma() or ucx.on_device else 1, ucx)  # over TCP alone ZeroMQ is faster, by a third
    shm = _start("shm", settings, start_shm)
    return DataPlane(
        Transports([] if shm is None else [shm], carrying),
        Outlet(
            memory,
            (lambda _: None) if shm is None else shm.shared,
            lambda peer: device if ucx is not None and ucx.takes_device(peer) else None,
        ),
        Inlet(memory, layout, device),
    )


def _start(name: str, settings: WorkerSettings, start: Callable[[], T]) -> T | None:
    """Starts a transport that is wanted, and that may not work here; one that was not installed is no cause for alarm.

    Raises:
        TransportMissing: it was asked for by name.
    """
    if settings.transport not in ("auto", name):
        return None
    try:
        return start()
    except OSError as error:
        sentence = f"Transport {name} cannot be used here: {error.strerror}"
        if settings.transport == name:
            raise TransportMissing(f"{sentence}; choose another one with --transport.") from error
        log.log(
            logging.INFO if error.errno == errno.ENOPKG else logging.WARNING, "%s; the next best is used.", sentence
        )
        return None
