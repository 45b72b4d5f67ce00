"""What all tests share."""

import os
from pathlib import Path

import pytest

# Before torch is imported: threads that spin while they wait keep the processes that tests start from the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where fetched models and converted weights are, on this machine."""
    return Path(os.environ.get("KVRELAY_CACHE_DIR", Path.home() / ".cache" / "kvrelay"))
