"""Where tests find what is made once per machine."""

import os
from pathlib import Path

CACHE_DIR = Path(os.environ.get("KVRELAY_CACHE_DIR", Path.home() / ".cache" / "kvrelay"))
