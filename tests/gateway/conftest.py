"""The bundled model's tokenizer, for the tests that need a real vocabulary."""

import os
from pathlib import Path

import hypothesis
import pytest

from kvrelay.checkpoint import resolve
from kvrelay.gateway.tokenizer import Tokenizer

# A busy machine makes an example slow, which is no fault of the code.
hypothesis.settings.register_profile("kvrelay", deadline=None)
hypothesis.settings.load_profile("kvrelay")


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    cache_dir = Path(os.environ.get("KVRELAY_CACHE_DIR", "~/.cache/kvrelay")).expanduser()
    return Tokenizer.load(resolve("smollm2-135m", cache_dir))
