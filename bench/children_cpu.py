"""What the processes of a cluster that a benchmark started have used of the processor."""

import time

from kvrelay.supervisor import Supervisor


def child_cpu_s(supervisor: Supervisor, name: str) -> float:
    """Processor time of all threads of a child so far, in its own and in the kernel's code.

    Raises:
        RuntimeError: it has ended.
    """
    if (pid := supervisor.pid(name)) is None:
        raise RuntimeError(f"{name} ended while it was measured; run this again.")
    clock = ~pid << 3 | 2  # as Linux' clock_getcpuclockid(3), which Python does not offer, makes it
    return time.clock_gettime(clock)
