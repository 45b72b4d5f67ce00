"""Memory that is lent is nobody else's until its last view is gone."""

import subprocess
import sys
import threading

import pytest

from kvrelay.transfer.scratch import Scratch

# Buffers of pieces, several at a time as in the mailbox, and how many pages the kernel had to give for the last ones.
FRESH_PAGES = """
import resource, sys
import zmq
from kvrelay.config import PrefillSettings
from kvrelay.transfer.data_plane import open_data_plane
from tests.transfer.plane import GEOMETRY, LAYOUT
from kvrelay.block_memory import BlockMemory

memory = BlockMemory.create(GEOMETRY)
settings = PrefillSettings.model_validate({"transport": sys.argv[1], "bind": "127.0.0.1"})
plane = open_data_plane(settings, zmq.Context(), 1, memory, LAYOUT, memory)
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        held = [b"".join([bytes(1024)] * 1024) for _ in range(8)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(2)
print(faults(10))
"""
PAGES_OF_PIECES = 10 * 8 * 2**20 // 4096


def test_what_is_held_is_not_lent_again() -> None:
    scratch = Scratch()
    held = [scratch.take(1000) for _ in range(8)]
    for number, view in enumerate(held):
        view[:] = bytes([number]) * 1000
    assert [bytes(view) for view in held] == [bytes([number]) * 1000 for number in range(8)]


def test_what_was_dropped_is_lent_again_in_any_size_that_fits() -> None:
    scratch = Scratch()
    view = scratch.take(1000)
    view[:4] = b"mark"
    del view
    assert bytes(scratch.take(600)[:4]) == b"mark"


def test_a_part_of_a_view_holds_it_all() -> None:
    scratch = Scratch()
    part = scratch.take(1000)[996:]
    part[:] = b"mark"
    scratch.take(1000)[:] = bytes(1000)
    assert bytes(part) == b"mark"


def test_another_thread_may_drop_the_last_view() -> None:
    scratch = Scratch()
    views = [scratch.take(1000)]
    views[0][:4] = b"mark"
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert bytes(scratch.take(1000)[:4]) == b"mark"


def test_what_is_kept_is_bounded() -> None:
    scratch = Scratch(max_kept_bytes=4096)
    held = [scratch.take(1024) for _ in range(8)]
    del held
    assert sum(len(free) for free in scratch._free.values()) == 4


def test_memory_for_nothing_is_empty() -> None:
    assert [len(Scratch().take(size)) for size in (0, 1, 1025)] == [0, 1, 1025]


@pytest.mark.parametrize("transport", ["auto", "zmq", "ucx"])
def test_payload_that_leaves_is_packed_into_memory_that_was_used_before(transport: str) -> None:
    command = [sys.executable, "-c", FRESH_PAGES, transport]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(result.stdout) < PAGES_OF_PIECES / 100
