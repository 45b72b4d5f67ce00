"""The one place that touches UCX: a worker that is polled, tagged messages in and out, and what they still read.

Everything here belongs to one thread. UCX makes progress only inside calls, so before that thread waits for
`descriptor`, `is_quiet` must have said that there is nothing to do.
"""

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kvrelay.device_memory import DeviceBytes, DeviceRoom
from kvrelay.errors import WireError
from kvrelay.transfer.scratch import Scratch

# UCX logs to stdout, and takes SIGHUP to wait for a debugger. As it reads these when it is loaded, only variables reach
# it; what users set wins.
_VARIABLES = {
    "UCX_LOG_FILE": "stderr",  # by its name: a path would be opened anew, and what the file holds already cut off
    "UCX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_DEBUG_SIGNO": "0",
}
_SEGMENT = "1088k"  # a piece of 1 MiB and its header in one: several times faster than UCX's 8 KiB
_CUDA = "cuda_copy/"  # UCX lists it only where it was built with CUDA, finds a GPU, and may use it
_RDMA = Path("/sys/class/infiniband")
_SIOCGIFADDR = 0x8915
EVERY_ADDRESS = "0.0.0.0"


class Message(NamedTuple):
    """Something that came under a tag and was not taken yet."""

    tag: int
    num_bytes: int
    probe: Any


class Transfer:
    """A send or a receive under way; its buffer must not change or go away before it is done."""

    def __init__(self, request: Any, buffer: Any) -> None:
        self._request = request
        self.buffer = buffer

    @property
    def done(self) -> bool:
        """UCX does not touch the buffer any more."""
        return bool(self._request.completed)

    def check(self) -> None:
        """Raises WireError if it failed."""
        if self.done and self._request.status:
            raise WireError(f"UCX could not move {len(self.buffer)} bytes.")


class UcxWorker:
    """UCX, set up for the network devices of one address. `on_device` says that it receives into `room`."""

    def __init__(self, host: str, ports: range, room: DeviceRoom | None = None) -> None:
        """Listens at the network device that has the address `host`, at every one for 0.0.0.0.

        `room` is on the device that has the KV, if one has.

        Raises:
            OSError: UCX cannot be used here, or (ENOPKG) is not installed; `strerror` says why.
        """
        self._ucx, self._array = _load()
        options = _options(host, ports, on_gpu=room is not None and room.is_cuda)
        try:
            features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
            self._context = self._ucx.UCXContext(options, features)
            self._worker = self._ucx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except self._ucx.UCXError as error:
            raise OSError(0, f"UCX says: {error}") from error
        self.address = bytes(memoryview(self._worker.address))
        self.descriptor: int = self._worker.epoll_file_descriptor
        self._any = self._ucx.UCXXTag(0), self._ucx.UCXXTagMask(0)
        self._scratch = Scratch()
        self._room = room if room is not None and self._reaches(room) else None
        self._has_entered = False
        self._abandoned: list[Transfer] = []

    @property
    def on_device(self) -> bool:
        """Whether payload can come from a device and go to ours."""
        return self._room is not None

    def is_quiet(self) -> bool:
        """True: nothing to do until `descriptor` can be read. False: call `progress`."""
        return bool(self._worker.arm())

    def progress(self) -> None:
        """Does what can be done now."""
        if self._room is not None and not self._has_entered:  # before UCX gets the first address of the device
            self._room.enter()
            self._has_entered = True
        self._worker.progress()
        self._abandoned = [each for each in self._abandoned if not each.done]

    def connect(self, address: bytes) -> Any:
        """An endpoint for what lies behind a worker's address.

        Raises:
            WireError: UCX finds no way there.
        """
        try:
            return self._worker.create_endpoint_from_worker_address(
                self._ucx.UCXAddress.create_from_buffer(address), True
            )
        except (self._ucx.UCXError, ValueError, IndexError) as error:
            raise WireError(f"UCX says: {error}.") from error

    def disconnect(self, endpoint: Any) -> None:
        """Closes an endpoint at once, also one that failed; what was not sent is dropped."""
        endpoint.close_blocking()  # not `close`, which crashes when the endpoint has failed

    def send(self, endpoint: Any, tag: int, payload: bytes | memoryview | DeviceBytes) -> Transfer:
        """Begins to send.

        Raises:
            WireError: the endpoint is over.
        """
        try:
            return Transfer(endpoint.tag_send(self._seen(payload), self._ucx.UCXXTag(tag)), payload)
        except self._ucx.UCXError as error:
            raise WireError(f"UCX says: {error}.") from error

    def arrived(self) -> Iterator[Message]:
        """What has come since, each told once: whatever its tag is, so that nothing is kept that nobody takes."""
        while probe := self._worker.tag_probe(*self._any, True):
            yield Message(probe.sender_tag.value, probe.length, probe)

    def take(self, message: Message, *, on_device: bool = False) -> Transfer:
        """Begins to receive a message into memory of its own.

        Raises:
            WireError: there is no device here, or it has no room.
        """
        buffer = self._device_room(message.num_bytes) if on_device else self._scratch.take(message.num_bytes)
        return Transfer(self._worker.tag_recv_with_handle(self._seen(buffer), message.probe), buffer)

    def abandon(self, transfer: Transfer) -> None:
        """Nobody waits for it any more; its buffer lives until UCX is done with it."""
        self._abandoned.append(transfer)

    def close(self) -> None:
        """Ends UCX; what is under way is dropped."""
        self._worker.cancel_inflight_requests()
        self._worker.progress()
        del self._worker, self._context
        self._abandoned.clear()

    def _device_room(self, num_bytes: int) -> DeviceBytes:
        if self._room is None:
            raise WireError("A payload was meant for a device, and there is none here.")
        return self._room.take(num_bytes)

    def _reaches(self, room: DeviceRoom) -> bool:
        return not room.is_cuda or _CUDA in self._context.info

    def _seen(self, buffer: bytes | memoryview | DeviceBytes) -> Any:
        return self._array(buffer.exposed if isinstance(buffer, DeviceBytes) else buffer)


def _load() -> tuple[ModuleType, Any]:
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        sentence = f"ucxx cannot be loaded ({error}); pip install 'kvrelay[ucx-cu13]' or 'kvrelay[ucx-cu12]' brings it"
        raise OSError(errno.ENOPKG, sentence) from error
    return libucxx, Array


def has_rdma() -> bool:
    """Whether UCX can use more than TCP here."""
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def _options(host: str, ports: range, *, on_gpu: bool) -> Mapping[str, str]:
    """Shared memory is left to the transport of that name: what UCX makes of it can outlive a killed process.

    That of GPUs is none of it; but from one GPU to another UCX copies only by the rendezvous protocol.
    """
    options = {
        "TLS": "^sm",
        "TCP_CONN_NB": "y",
        "TCP_PORT_RANGE": f"{ports[0]}-{ports[-1]}" if ports[0] else "0",
        "TCP_TX_SEG_SIZE": _SEGMENT,
        "TCP_RX_SEG_SIZE": _SEGMENT,
    }
    if others := _other_devices(host):
        options["NET_DEVICES"] = f"^{','.join(others)}"
    if not has_rdma() and not on_gpu:
        options["RNDV_THRESH"] = "inf"  # over TCP the rendezvous protocol only costs
    return options


def _other_devices(host: str) -> list[str]:
    """Network devices that others must not reach us by.

    Raises:
        OSError: none has the address.
    """
    wanted = socket.gethostbyname(host)
    if wanted == EVERY_ADDRESS:
        return []
    names = [name for _, name in socket.if_nameindex()]
    others = [name for name in names if _address_of(name) != wanted]
    if len(others) == len(names):
        raise OSError(0, f"no network device has {wanted} as its address")
    return others


def _address_of(device: str) -> str:
    """Its first IPv4 address, "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
