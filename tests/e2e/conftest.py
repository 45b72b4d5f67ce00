"""A small model and a folder, the same for all tests of a file."""

from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_tiny_model(folder / "tiny")
