"""Runs a program that the kernel kills when its parent dies, so that a killed supervisor leaves nothing behind.

Run as a file, `python -IS leash.py PARENT_PID PROGRAM ...`, since code between fork and exec would be unsafe in a
parent with threads. The request to the kernel outlives exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for the signal, makes sure that the parent still lives, and becomes the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == parent:  # otherwise it died before the request, and nobody will ever send the signal
        os.execvp(program[0], program)


if __name__ == "__main__":
    main()
