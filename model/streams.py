"""The two queues of work of a device: what the network computes, and copies of KV. The CPU has neither."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a queue: it is reached when all that was queued before is done."""

    def wait(self, stream: Any) -> None:
        """Lets what is queued on a stream from here on wait until the mark is reached."""
        ...

    def synchronize(self) -> None:
        """The caller itself waits until the mark is reached."""
        ...


class Streams(Protocol):
    """Queues of one device. But for `Mark.synchronize`, nothing waits: order is all that is said."""

    def computed(self) -> Mark:
        """A mark behind all that was given to the network's queue. Not to be asked for inside `copying`."""
        ...

    def copied(self) -> Mark:
        """A mark behind all that was given to the queue of copies."""
        ...

    def compute_after(self, mark: Mark) -> None:
        """What the network queues from here on waits for the mark."""
        ...

    def copy_after(self, mark: Mark) -> None:
        """What copies queue from here on waits for the mark."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Work on the device goes to the queue of copies inside."""
        ...

    def arriving(self) -> AbstractContextManager[object]:
        """Memory of the device that is taken inside is none that queued work still uses: anybody may write to it."""
        ...

    def enter(self) -> None:
        """The calling thread, which may be any, is on the device from here on."""
        ...

    def host_buffer(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Memory `[num_rows, row_bytes]`, uint8, that the device copies to and from while the host goes on."""
        ...

    def upload(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Ids `[n]`, int64, on the device, without a wait. Inside `copying`."""
        ...

    def retain(self, tensor: torch.Tensor) -> None:
        """This memory of the device is given to nobody before the copies queued until now are done."""
        ...


class CudaStreams:
    """A GPU's: the stream that is current in the calling thread, and one of its own for copies.

    Nothing is ever queued on a third one. Memory that is freed while a stream may still use it, torch gives to that
    stream again, trusting in its order; those who write from outside know of none.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError if torch cannot use the device."""
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrivals = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def computed(self) -> Mark:
        """See `Streams`."""
        return self._mark(torch.cuda.current_stream(self._device))

    def copied(self) -> Mark:
        """See `Streams`."""
        return self._mark(self._copies)

    def compute_after(self, mark: Mark) -> None:
        """See `Streams`."""
        mark.wait(torch.cuda.current_stream(self._device))

    def copy_after(self, mark: Mark) -> None:
        """See `Streams`."""
        mark.wait(self._copies)

    def copying(self) -> AbstractContextManager[object]:
        """See `Streams`."""
        return torch.cuda.stream(self._copies)

    def arriving(self) -> AbstractContextManager[object]:
        """See `Streams`."""
        return torch.cuda.stream(self._arrivals)

    def enter(self) -> None:
        """CUDA makes its context when it is first asked for something."""
        torch.cuda.set_device(self._arrivals.device)
        self._arrivals.query()

    def host_buffer(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Pinned."""
        return torch.empty((num_rows, row_bytes), dtype=torch.uint8, pin_memory=True)

    def upload(self, block_ids: Sequence[int]) -> torch.Tensor:
        """From pinned memory, which torch keeps until the copy is done."""
        return torch.tensor(block_ids, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)

    def retain(self, tensor: torch.Tensor) -> None:
        """See `Streams`."""
        tensor.record_stream(self._copies)

    def _mark(self, stream: torch.cuda.Stream) -> Mark:
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(stream)
        return mark


class HostMark:
    """Always reached."""

    def wait(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostStreams:
    """Those of the CPU, which does everything at once and in order."""

    def computed(self) -> Mark:
        """See `Streams`."""
        return HostMark()

    def copied(self) -> Mark:
        """See `Streams`."""
        return HostMark()

    def compute_after(self, mark: Mark) -> None:
        """Nothing to wait for."""

    def copy_after(self, mark: Mark) -> None:
        """Nothing to wait for."""

    def copying(self) -> AbstractContextManager[object]:
        """Nothing changes."""
        return nullcontext()

    def arriving(self) -> AbstractContextManager[object]:
        """Nothing is queued."""
        return nullcontext()

    def enter(self) -> None:
        """Every thread is there."""

    def host_buffer(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Plain memory."""
        return torch.empty((num_rows, row_bytes), dtype=torch.uint8)

    def upload(self, block_ids: Sequence[int]) -> torch.Tensor:
        """A tensor."""
        return torch.tensor(block_ids, dtype=torch.int64)

    def retain(self, tensor: torch.Tensor) -> None:
        """Nothing is queued."""
