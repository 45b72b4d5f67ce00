"""Lines from several threads to one stream, never mixed within a line."""

import threading
from typing import TextIO


class LineWriter:
    """Writes whole lines. When nobody reads the stream any more it goes silent instead of stopping its callers."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._gone = False

    def __call__(self, text: str) -> None:
        """Writes one line."""
        with self._lock:
            if self._gone:
                return
            try:
                self._stream.write(f"{text}\n")
                self._stream.flush()
            except OSError:  # a closed pipe or terminal: those who write must go on reading their children's output
                self._gone = True
