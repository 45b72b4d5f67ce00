"""Starts a cluster of `kvrelay verify --local`, and ends it with everything it started."""

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvrelay.bench.cluster import free_port
from kvrelay.bench.verify_arms import Addresses, LocalArm, child_specs
from kvrelay.bench.verify_client import snapshot_of
from kvrelay.client import GatewayError
from kvrelay.config import VerifySettings
from kvrelay.errors import StartError
from kvrelay.supervisor import Supervisor
from kvrelay.types import KVLayout
from kvrelay.up import waiting_for

READY_S = 300.0
_LOOK_S = 0.1
_MAX_LINES = 40


@contextmanager
def running(arm: LocalArm, settings: VerifySettings, layout: KVLayout | None) -> Iterator[str]:
    """Yields the URL of a cluster all of whose workers are there and used.

    Raises:
        StartError: a process of it ended, or it did not get ready in time; the text says which and why.
    """
    addresses, lines = Addresses(free_port(), free_port()), deque[str](maxlen=_MAX_LINES)
    supervisor = Supervisor(child_specs(arm, settings, addresses, layout, os.environ), lines.append)
    try:
        _wait(supervisor, [name for name, _ in arm.workers], addresses.url, lines)
        yield addresses.url
    finally:
        supervisor.stop()


def _wait(supervisor: Supervisor, workers: list[str], url: str, lines: deque[str]) -> None:
    deadline, waits_for = time.monotonic() + READY_S, "Waiting"
    while waits_for:
        for death in supervisor.step():
            raise StartError(f"{death.name} ended with {death.how}: {death.words or ' '.join(lines)}")
        if time.monotonic() > deadline:
            raise StartError(f"The cluster was not ready within {READY_S:g} s. {waits_for} {' '.join(lines)}")
        time.sleep(_LOOK_S)
        waits_for = waiting_for(workers, _snapshot(url))


def _snapshot(url: str) -> dict[str, Any] | None:
    try:
        return snapshot_of(url)
    except GatewayError:  # it is still starting; if it ends instead, the supervisor says so
        return None
