"""The supervisor with real processes that stand in for gateway and workers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kvrelay import leash
from kvrelay.children import ChildSpec, Death
from kvrelay.restart import RestartPolicy
from kvrelay.supervisor import Supervisor

WAIT_S = 20.0
HELLO = "import os, time; print('pid', os.getpid()); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {HELLO}"


class Nursery:
    """A supervisor, what its children said, and how they died."""

    def __init__(self, **scripts: str) -> None:
        self.said: list[str] = []
        self.deaths: list[Death] = []
        specs = [ChildSpec(name, [sys.executable, "-c", code], dict(os.environ)) for name, code in scripts.items()]
        self.supervisor = Supervisor(specs, self.said.append)

    def until(self, condition: Callable[[], bool]) -> None:
        """Supervises until the condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"said {self.said[-5:]}, died {self.deaths}"
            self.deaths += self.supervisor.step()
            time.sleep(0.02)

    def pids(self, name: str) -> list[int]:
        """The process ids that a child of this name has had, in order."""
        return [int(line.split()[-1]) for line in list(self.said) if line.startswith(f"{name} | pid ")]


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has reaped yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def gone_soon(*pids: int) -> bool:
    """Whether all of these processes end within the patience of a test."""
    deadline = time.monotonic() + WAIT_S
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture
def nursery() -> Iterator[Callable[..., Nursery]]:
    """Makes nurseries and sees to it that no test leaves children behind."""
    made: list[Nursery] = []

    def make(**scripts: str) -> Nursery:
        made.append(Nursery(**scripts))
        return made[-1]

    yield make
    for each in made:
        each.supervisor.stop()


def test_restart_policy_waits_longer_each_time_up_to_a_limit() -> None:
    policy, now, delays = RestartPolicy(), 100.0, []
    for _ in range(9):
        policy.started(now)
        now += 1.0
        delays.append(policy.died(now) - now)
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_restart_policy_forgets_after_a_minute_of_life() -> None:
    policy = RestartPolicy()
    for life_s, delay_s in ((1.0, 0.5), (1.0, 1.0), (59.9, 2.0), (60.0, 0.5), (1.0, 1.0)):
        policy.started(1000.0)
        assert policy.died(1000.0 + life_s) == 1000.0 + life_s + delay_s


def test_children_run_in_sessions_of_their_own(nursery: Callable[..., Nursery]) -> None:
    """A terminal's Ctrl-C goes to a whole session; children must leave it to the supervisor."""
    home = nursery(a=HELLO)
    home.until(lambda: len(home.pids("a")) == 1)
    pid = home.pids("a")[0]
    assert os.getsid(pid) == pid != os.getsid(0)


def test_a_killed_child_is_reported_and_started_again(nursery: Callable[..., Nursery]) -> None:
    home = nursery(a=HELLO, b=HELLO)
    home.until(lambda: len(home.pids("a")) == len(home.pids("b")) == 1)
    os.kill(home.pids("a")[0], signal.SIGKILL)
    home.until(lambda: bool(home.deaths))
    assert home.deaths[0].code == -signal.SIGKILL
    assert home.deaths[0].how == "signal SIGKILL"
    assert 0 < home.supervisor.restart_in_s("a") <= 0.5
    home.until(lambda: len(home.pids("a")) == 2)
    assert len(home.pids("b")) == 1
    assert alive(home.pids("b")[0])


def test_a_child_that_ends_at_once_is_not_started_again_at_once(nursery: Callable[..., Nursery]) -> None:
    home = nursery(a="raise SystemExit('no luck')")
    begin = time.monotonic()
    home.until(lambda: len(home.deaths) == 3)
    assert time.monotonic() - begin >= 0.5 + 1.0
    assert home.deaths[0] == Death("a", 1, "no luck")


def test_why_a_child_cannot_start_is_in_its_death_and_nowhere_else(nursery: Callable[..., Nursery]) -> None:
    """Whoever supervises says it once; relayed as well, the user would read it twice."""
    home = nursery(a="import sys; print('loading'); sys.stderr.write('kvrelay: The port is taken.\\n'); sys.exit(2)")
    home.until(lambda: bool(home.deaths))
    assert home.deaths == [Death("a", 2, "The port is taken.")]
    assert home.said == ["a | loading"]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("15:17:03 decode-0 is up.", ""),
        ("2026-01-02 15:17:03,123 INFO kvrelay.process: It is up.", ""),
        (
            "2026-01-02 15:17:03,123 ERROR kvrelay.process: It fell.",
            "2026-01-02 15:17:03,123 ERROR kvrelay.process: It fell.",
        ),
        ("Killed", "Killed"),
    ],
)
def test_last_words_are_those_that_do_not_only_inform(nursery: Callable[..., Nursery], last: str, words: str) -> None:
    home = nursery(a=f"print('oh'); print({last!r}); raise SystemExit(1)")
    home.until(lambda: bool(home.deaths))
    assert home.deaths[0] == Death("a", 1, words)


def test_lines_of_several_children_never_mix(nursery: Callable[..., Nursery]) -> None:
    code = "for i in range(300): print('{0}' * 200, flush=i % 7 == 0)"
    home = nursery(a=code.format("a"), b=code.format("b"))
    home.until(lambda: len(home.deaths) >= 2)
    assert set(home.said) == {f"a | {'a' * 200}", f"b | {'b' * 200}"}
    assert len(home.said) == 600


def test_a_progress_bar_shows_where_it_got_to(nursery: Callable[..., Nursery]) -> None:
    home = nursery(a="print('10 %\\r50 %\\r100 %'); print(); print(b'\\xff'.decode('latin-1'))")
    home.until(lambda: bool(home.deaths))
    assert home.said == ["a | 100 %", "a | ÿ"]


def test_stop_ends_the_willing_at_once_and_the_stubborn_within_five_seconds(nursery: Callable[..., Nursery]) -> None:
    home = nursery(a=HELLO, b=STUBBORN)
    home.until(lambda: len(home.pids("a")) == len(home.pids("b")) == 1)
    begin = time.monotonic()
    home.supervisor.stop()
    assert time.monotonic() - begin < 5.0
    assert not alive(home.pids("a")[0])
    assert not alive(home.pids("b")[0])
    assert [line for line in home.said if "is killed" in line] == ["b did not end within 3 s and is killed"]


def test_stop_tells_the_first_child_before_the_others(nursery: Callable[..., Nursery]) -> None:
    """The gateway would take the ends of its workers for faults."""
    dated = f"import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(time.time()))); {HELLO}"
    home = nursery(a=dated, b=dated, c=dated)
    home.until(lambda: all(home.pids(name) for name in "abc"))
    home.supervisor.stop()
    home.until(lambda: len(home.deaths) == 3)
    told = {death.name: float(death.words) for death in home.deaths}
    assert told["a"] < min(told["b"], told["c"])


def test_stop_also_ends_what_a_stubborn_child_started(
    nursery: Callable[..., Nursery], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.supervisor.TERMINATE_S", 0.3)
    grandchild = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {HELLO!r}]); {STUBBORN}"
    home = nursery(a=grandchild)
    home.until(lambda: len(home.pids("a")) == 2)
    home.supervisor.stop()
    assert gone_soon(*home.pids("a"))


def test_a_killed_supervisor_leaves_no_orphans() -> None:
    code = (
        "import os, sys, time; from kvrelay.children import ChildSpec; from kvrelay.supervisor import Supervisor\n"
        f"specs = [ChildSpec(n, [sys.executable, '-c', {STUBBORN!r}], dict(os.environ)) for n in 'ab']\n"
        "supervisor = Supervisor(specs, lambda line: print(line, flush=True))\n"
        "while True: supervisor.step(); time.sleep(0.02)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(supervisor.stdout.readline().split()[-1]) for _ in range(2)]
        assert all(map(alive, pids))
        supervisor.kill()
    assert gone_soon(*pids)


def test_a_child_whose_parent_died_first_does_not_start() -> None:
    """The kernel was asked too late: nobody would ever send the signal."""
    command = [sys.executable, "-IS", leash.__file__, str(os.getpid() + 1), sys.executable, "-c", "print('started')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_child_has_a_process_number_while_it_runs(nursery: Callable[..., Nursery]) -> None:
    group = nursery(worker=HELLO)
    assert group.supervisor.pid("worker") is None  # not started yet
    group.until(lambda: bool(group.pids("worker")))
    pid = group.supervisor.pid("worker")
    assert pid == group.pids("worker")[-1]
    os.kill(pid, signal.SIGKILL)
    group.until(lambda: bool(group.deaths))
    assert group.supervisor.pid("worker") is None
