"""The bundled model's tokenizer, for the tests that need a real vocabulary."""

from pathlib import Path

import hypothesis
import pytest

from kvrelay.checkpoint import resolve
from kvrelay.gateway.tokenizer import Tokenizer

# A busy machine makes an example slow, which is no fault of the code.
hypothesis.settings.register_profile("kvrelay", deadline=None)
hypothesis.settings.load_profile("kvrelay")


@pytest.fixture(scope="session")
def smollm2(cache_dir: Path) -> Tokenizer:
    return Tokenizer.load(resolve("smollm2-135m", cache_dir))
