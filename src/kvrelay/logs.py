"""Logging of every process: one line per record, to stderr."""

import logging


def configure(level: str) -> None:
    """Sends records of `level` and above to stderr, with the time and where they come from."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.captureWarnings(capture=True)
