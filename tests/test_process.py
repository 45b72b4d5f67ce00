"""What worker and gateway processes share."""

import gc
from collections.abc import Iterator

import pytest

from kvrelay.process import spare_what_is_loaded


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_what_is_loaded_is_not_looked_through_again() -> None:
    kept = [[number] for number in range(1000)]
    spare_what_is_loaded()
    assert gc.get_freeze_count() >= len(kept)
    assert len(gc.get_objects()) < len(kept)
