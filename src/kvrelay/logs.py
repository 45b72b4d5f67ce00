"""Logging of every process: one line per record, to stderr."""

import logging
import re
from collections import Counter

_FULL = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SHORT = "%(asctime)s %(message)s"
_TIME_OF_DAY = "%H:%M:%S"
_ROUTINE = re.compile(r"\d\d:\d\d:\d\d |\d{4}-\d\d-\d\d [\d:,]+ (INFO|DEBUG) ")


class ShortFormatter(logging.Formatter):
    """Time of day and message. Warnings and errors keep everything: somebody will look for where they come from."""

    def __init__(self) -> None:
        super().__init__(_SHORT, _TIME_OF_DAY)
        self._full = logging.Formatter(_FULL)

    def format(self, record: logging.LogRecord) -> str:
        """One record as text."""
        return self._full.format(record) if record.levelno > logging.INFO else super().format(record)


def configure(level: str, form: str = "full") -> None:
    """Sends records of `level` and above to stderr. `form` is "full", or "short" as in `ShortFormatter`."""
    handler = logging.StreamHandler()
    handler.setFormatter(ShortFormatter() if form == "short" else logging.Formatter(_FULL))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)


def count_fault(counters: Counter[str], name: str, log: logging.Logger, sentence: str) -> None:
    """Counts what a peer did wrong, and logs the first of its kind: a broken peer must not fill the disk."""
    if not counters[name]:
        log.warning("%s Further ones are only counted.", sentence)
    counters[name] += 1


def is_routine(line: str) -> bool:
    """Whether a line that `configure` formatted is no warning and no error."""
    return _ROUTINE.match(line) is not None
