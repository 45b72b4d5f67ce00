"""One child process: started on a leash, its output relayed line by line under its name."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvrelay import leash, logs

_MAX_LINE_BYTES = 1 << 16
_LAST_WORDS = "kvrelay: "


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start: a name for people, the program and its arguments, and its whole environment."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended. `code` is its exit code, or minus the signal that killed it.

    `words` is the last line that it wrote, empty if that says nothing about the end because it only informs.
    """

    name: str
    code: int
    words: str

    @property
    def how(self) -> str:
        """Its exit code or the signal that killed it, for people."""
        return f"exit code {self.code}" if self.code >= 0 else f"signal {_signal_name(-self.code)}"


class Child:
    """A running child in a session of its own, so that a terminal's Ctrl-C reaches the supervisor only."""

    def __init__(self, spec: ChildSpec, relay: Callable[[str], None]) -> None:
        """Starts it. `relay` is called with each line of its output, from a thread of this child's own."""
        self.spec = spec
        self._relay = relay
        self._last_words = ""
        self._process = subprocess.Popen(
            [sys.executable, "-IS", str(Path(leash.__file__)), str(os.getpid()), *spec.argv],
            env={**spec.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"output of {spec.name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def poll(self) -> Death | None:
        """Its death, once it happened."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(timeout=1.0)  # what it said last may still be in the pipe
        return Death(self.spec.name, code, self._last_words)

    def terminate(self) -> None:
        """Asks it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it and whatever it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; tells whether it came in time."""
        try:
            self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self) -> None:
        with _output(self._process) as pipe:
            while line := pipe.readline(_MAX_LINE_BYTES):
                # A progress bar redraws its line after \r: what it shows last is what counts.
                text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
                if text:
                    self._take(text)

    def _take(self, text: str) -> None:
        self._last_words = "" if logs.is_routine(text) else text.removeprefix(_LAST_WORDS)
        if not text.startswith(_LAST_WORDS):  # why it could not start: whoever sees its death says it, once
            self._relay(f"{self.spec.name} | {text}")


def _output(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdout is None:
        raise ValueError("The child was started without a pipe for its output.")
    return process.stdout


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
