"""Two ends of a transport; the module that uses them says of which `transport_kind`, all in turn or one."""

from collections.abc import Iterator

import pytest

from tests.transfer.device_ends import DeviceEnds
from tests.transfer.plane import End, Ends


@pytest.fixture
def ends(transport_kind: str) -> Iterator[Ends]:
    made = DeviceEnds() if transport_kind == "ucx of devices" else Ends(transport_kind)
    yield made
    made.close()


@pytest.fixture
def sender(ends: Ends) -> End:
    return ends.make()


@pytest.fixture
def receiver(ends: Ends) -> End:
    return ends.make()
