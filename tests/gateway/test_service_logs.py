"""What the gateway logs about workers that leave."""

import logging

import pytest

from kvrelay.config import GatewaySettings
from kvrelay.gateway.service import Service
from kvrelay.types import Role
from tests.gateway.nouns import FINGERPRINT, GATEWAY, MODEL, hello


@pytest.mark.parametrize("stopping", [False, True])
def test_a_lost_worker_is_a_warning_unless_the_gateway_itself_is_ending(
    stopping: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(
        GatewaySettings(),
        model=MODEL,
        fingerprint=FINGERPRINT,
        incarnation=GATEWAY,
        send=lambda _worker, _message: True,
        clock=lambda: 0.0,
    )
    service.on_message(2, hello(2, Role.PREFILL))
    if stopping:
        service.shut_down()
    service.on_lost([2])
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ([] if stopping else ["prefill-2 is lost: its connection was lost."])
    assert service.snapshot()["workers"] == []
