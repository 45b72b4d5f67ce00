"""Where a worker computes. Must run before torch is imported: its thread pools read this once, when they start."""

import os

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def place(core: int | None, threads: int | None) -> int:
    """Pins this process to a core (modulo the usable ones) and sets how many threads compute; gives that number."""
    if core is not None:
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {usable[core % len(usable)]})
    count = threads or len(os.sched_getaffinity(0))
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(count)))
    # Threads that spin for long while they wait take the cores from the other processes of the cluster. But for some
    # tens of microseconds they should: a step on several threads waits hundreds of times, and waking takes longer.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    return count
