"""Memory that is lent is nobody else's until its last view is gone."""

import threading

from kvrelay.transfer.scratch import Scratch


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
