"""Gateways with workers that the tests play."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.http.running import Gateway, running


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """A gateway without workers."""
    with running(tmp_path) as started:
        yield started


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for all tests of a module."""
    with running(tmp_path_factory.mktemp("model"), max_body_bytes=64 * 1024) as started:
        yield started
