"""What all tests share."""

import os
from pathlib import Path

import pytest

from tests.places import CACHE_DIR

# Many tests have a cache folder of their own; compiling for each of them would take most of their time.
os.environ.setdefault("KVRELAY_NATIVE_DIR", str(CACHE_DIR))
# Before torch is imported: threads that spin while they wait keep the processes that tests start from the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

SLOW_FOLDERS = ("e2e", "model")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow ones first, so that processes that share the tests end at nearly the same time."""
    items.sort(key=lambda item: item.path.relative_to(Path(__file__).parent).parts[0] not in SLOW_FOLDERS)


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where fetched models and converted weights are, on this machine."""
    return CACHE_DIR
