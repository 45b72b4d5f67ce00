"""What a line of the log looks like, as a process of its own writes it."""

import re
import subprocess
import sys

from kvrelay.logs import is_routine

CODE = """
import logging, sys
from kvrelay import logs
logs.configure("info", sys.argv[1])
log = logging.getLogger("kvrelay.here")
log.debug("hidden")
log.info("It is up.")
log.warning("It is lost.")
"""
FULL = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


def lines(form: str) -> list[str]:
    """What is written to stderr."""
    done = subprocess.run([sys.executable, "-c", CODE, form], capture_output=True, text=True, timeout=60, check=True)
    return done.stderr.splitlines()


def test_the_full_form_has_date_level_and_origin() -> None:
    info, warning = lines("full")
    assert re.fullmatch(FULL + r"INFO kvrelay\.here: It is up\.", info)
    assert re.fullmatch(FULL + r"WARNING kvrelay\.here: It is lost\.", warning)
    assert (is_routine(info), is_routine(warning)) == (True, False)


def test_the_short_form_shortens_what_only_informs() -> None:
    info, warning = lines("short")
    assert re.fullmatch(r"\d\d:\d\d:\d\d It is up\.", info)
    assert re.fullmatch(FULL + r"WARNING kvrelay\.here: It is lost\.", warning)
    assert (is_routine(info), is_routine(warning)) == (True, False)
