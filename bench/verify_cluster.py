"""Starts a cluster of `kvrelay verify --local`, and ends it with everything it started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.bench.cluster import free_port, started
from kvrelay.bench.verify_arms import Addresses, LocalArm, child_specs
from kvrelay.config import VerifySettings
from kvrelay.types import KVLayout


@contextmanager
def running(arm: LocalArm, settings: VerifySettings, layout: KVLayout | None) -> Iterator[str]:
    """Yields the URL of a cluster all of whose workers are there and used.

    Raises:
        StartError: a process of it ended, or it did not get ready in time; the text says which and why.
    """
    addresses = Addresses(free_port(), free_port())
    specs = child_specs(arm, settings, addresses, layout, os.environ)
    with started(specs, [name for name, _ in arm.workers], addresses.url):
        yield addresses.url
