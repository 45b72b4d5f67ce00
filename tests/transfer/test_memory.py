"""A memory bounded in time and number."""

from kvrelay.transfer.protocol.memory import Remembered


def test_it_forgets_after_its_time() -> None:
    memory: Remembered[str, int] = Remembered(10.0, 100)
    memory.put("a", 1, now=0.0)
    memory.put("b", 2, now=5.0)
    memory.forget_old(now=10.0)
    assert (memory.get("a"), memory.get("b"), len(memory)) == (None, 2, 1)


def test_it_keeps_the_newest_when_full() -> None:
    memory: Remembered[int, int] = Remembered(10.0, 3)
    for i in range(100):
        memory.put(i, i, now=0.0)
    assert [memory.get(i) for i in range(96, 100)] == [None, 97, 98, 99]


def test_what_is_put_again_counts_from_then() -> None:
    memory: Remembered[str, int] = Remembered(10.0, 2)
    memory.put("a", 1, now=0.0)
    memory.put("b", 1, now=1.0)
    memory.put("a", 2, now=2.0)
    memory.put("c", 3, now=3.0)
    assert (memory.get("a"), memory.get("b")) == (2, None)
    memory.forget("a")
    assert memory.get("a") is None
