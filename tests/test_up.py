"""`kvrelay up`: what it starts and with which settings, what it says while it waits, and how it ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay import restart
from kvrelay.children import ChildSpec
from kvrelay.client import connect
from kvrelay.config import DecodeSettings, GatewaySettings, PrefillSettings, Settings, UpSettings
from kvrelay.errors import AddressInUse, StartError
from kvrelay.options import options, parse, variable
from kvrelay.supervisor import Supervisor
from kvrelay.types import Role
from kvrelay.up import ClusterRun, Stop, child_specs, http_url, program, ready_text, waiting_for, with_addresses

WAIT_S = 30.0

# A gateway that is ready and has both workers once it was asked five times, and a worker that only sleeps.
GATEWAY = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        worker = {"ledger": {"total": 1}, "usable": Handler.asked > 4, "reason": "It is new."}
        workers = [{"name": name, **worker} for name in ("prefill-0", "decode-0")[: Handler.asked - 1]]
        snapshot = {"ready": Handler.asked > 3, "reason": "It is warming up.", "model": "m", "workers": workers}
        body = json.dumps(snapshot).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
WORKER = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVRELAY_")]:
        monkeypatch.delenv(name)


def filled(spec: ChildSpec, settings_type: type[Settings], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings that a child would have."""
    with monkeypatch.context() as patch:
        for name in options(settings_type):
            if variable(name) in spec.environ:
                patch.setenv(variable(name), spec.environ[variable(name)])
        return parse(settings_type, "kvrelay x", spec.argv[4:])


def test_every_option_reaches_every_child_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = UpSettings(
        prefill=2, both=1, listen="tcp://0.0.0.0:5701", port=9000, dtype="float32", death_s=3.5, block_size=32
    )
    specs = child_specs(settings, {"PATH": "/bin", "KVRELAY_CORE": "7", "kvrelay_name": "x"})
    assert [spec.name for spec in specs] == ["gateway", "prefill-0", "prefill-1", "decode-0", "both-0"]
    gateway = filled(specs[0], GatewaySettings, monkeypatch)
    assert gateway == GatewaySettings(listen="tcp://0.0.0.0:5701", port=9000, death_s=3.5, log_format="short")
    shared: dict[str, Any] = {
        "gateways": ("tcp://127.0.0.1:5701",),
        "dtype": "float32",
        "death_s": 3.5,
        "block_size": 32,
        "log_format": "short",
    }
    assert filled(specs[2], PrefillSettings, monkeypatch) == PrefillSettings(
        name="prefill-1", core=1, workers_on_machine=4, **shared
    )
    assert filled(specs[4], DecodeSettings, monkeypatch) == DecodeSettings(
        role=Role.BOTH, name="both-0", core=3, workers_on_machine=4, **shared
    )
    assert all(spec.environ["PATH"] == "/bin" and "kvrelay_name" not in spec.environ for spec in specs)
    assert [spec.argv[3] for spec in specs] == ["gateway", "prefill", "prefill", "decode", "decode"]


def test_workers_are_not_pinned_to_one_core_when_they_are_to_use_several() -> None:
    specs = child_specs(UpSettings(listen="tcp://127.0.0.1:5701", threads=4), {})
    assert all("KVRELAY_CORE" not in spec.environ for spec in specs)
    assert specs[1].environ["KVRELAY_THREADS"] == "4"


def test_addresses_are_settled_before_children_start() -> None:
    settings = with_addresses(UpSettings(port=0))
    assert settings.port > 0
    assert settings.listen.startswith("tcp://127.0.0.1:")
    assert with_addresses(UpSettings(port=0, listen="tcp://10.0.0.1:5700")).listen == "tcp://10.0.0.1:5700"


def test_a_taken_port_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}: .*--port"):
            with_addresses(UpSettings(port=port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(AddressInUse, match=r"203\.0\.113\.1:0"):
        with_addresses(UpSettings(host="203.0.113.1", port=0))


def test_the_url_is_one_that_this_machine_can_open() -> None:
    assert http_url(UpSettings(port=9000)) == "http://127.0.0.1:9000"
    assert http_url(UpSettings(host="0.0.0.0", port=9000)) == "http://127.0.0.1:9000"
    assert http_url(UpSettings(host="::1", port=9000)) == "http://[::1]:9000"


def test_what_it_waits_for() -> None:
    workers = ["prefill-0", "decode-0"]
    assert "gateway" in waiting_for(workers, None)
    decode, prefill = described("decode-0"), described("prefill-0")
    some = {"ready": False, "reason": "No worker can serve yet.", "workers": [decode]}
    assert waiting_for(workers, some) == "Waiting for prefill-0: loading the model…"
    assert waiting_for(workers, {**some, "workers": [decode, prefill]}) == "Waiting: No worker can serve yet."


def test_it_waits_for_every_worker_of_its_own_and_for_no_other() -> None:
    """A pair can serve long before the last worker is up."""
    workers = ["prefill-0", "decode-0", "decode-1"]
    two = [described("prefill-0"), described("decode-0")]

    def waits_with(*others: dict[str, Any]) -> str:
        return waiting_for(workers, {"ready": True, "reason": "", "workers": [*two, *others]})

    assert waits_with() == "Waiting for decode-1: loading the model…"
    assert waits_with({**described("decode-1"), "ledger": None}) == "Waiting for decode-1: loading the model…"
    unused = {"usable": False, "reason": "It is draining."}
    assert waits_with({**described("decode-1"), **unused}) == "Waiting for decode-1: It is draining."
    assert waits_with(described("decode-1"), {**described("elsewhere"), **unused}) == ""


def described(name: str) -> dict[str, Any]:
    """A worker in `/cluster` that is used."""
    return {"name": name, "ledger": {"total": 1}, "usable": True, "reason": ""}


def test_the_command_is_shown_as_the_user_can_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "kvrelay"
    command.parent.mkdir()
    command.touch(mode=0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    for run_as, shown in ((str(command), str(command)), ("bin/kvrelay", "bin/kvrelay"), ("x/__main__.py", "kvrelay")):
        monkeypatch.setattr("sys.argv", [run_as, "up"])
        assert program() == shown
    monkeypatch.setenv("PATH", str(command.parent))
    monkeypatch.setattr("sys.argv", [str(command), "up"])
    assert program() == "kvrelay"


def test_the_ready_text_is_one_line_and_commands_to_paste() -> None:
    ready, curl, chat = ready_text("http://127.0.0.1:8000", "it's", "bin/kvrelay").splitlines()
    assert chat == "  bin/kvrelay chat"
    assert ready_text("http://127.0.0.1:9000", "m", "kvrelay").endswith("\n  kvrelay chat --url http://127.0.0.1:9000")
    assert "http://127.0.0.1:8000" in ready
    done = subprocess.run(
        ["bash", "-c", curl.replace("curl", "printf '%s\\n'")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].startswith('{"model": "it\'s"')


class Up:
    """`ClusterRun` with stand-in children, in the calling thread."""

    def __init__(self, **scripts: str) -> None:
        self.said: list[str] = []
        self.settings = with_addresses(UpSettings(port=0))
        specs = [
            ChildSpec(name, [sys.executable, "-c", code, str(self.settings.port)], dict(os.environ))
            for name, code in scripts.items()
        ]
        self.supervisor = Supervisor(specs, self.said.append)
        self.stop = Stop()

    def run(self, until: Callable[[ClusterRun], bool]) -> None:
        """Runs until the condition holds, at the latest after a test's patience, or until a child ends it."""
        with connect(http_url(self.settings), timeout_s=1.0) as client:
            run = ClusterRun(self.settings, self.supervisor, client, self.said.append)
            watcher = threading.Thread(target=self._watch, args=[lambda: until(run)])
            watcher.start()
            try:
                run.until(self.stop)
            finally:
                self.stop.asked = True
                self.supervisor.stop()
                watcher.join()

    def _watch(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition() and not self.stop.asked and time.monotonic() < deadline:
            time.sleep(0.02)
        self.stop.asked = True


def test_it_says_what_it_waits_for_and_then_once_that_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    up = Up(gateway=GATEWAY, worker=WORKER)
    up.run(lambda run: run.ready)
    assert up.said == [
        "Waiting for the gateway to start…",
        "Waiting for prefill-0, decode-0: loading the model…",
        "Waiting for decode-0: loading the model…",
        "Waiting: It is warming up.",
        "Waiting for prefill-0: It is new.",
    ]
    assert capsys.readouterr().out.startswith(f"KVRelay is ready and serves m at {http_url(up.settings)}\n  curl ")


def test_a_child_that_cannot_start_ends_it_with_its_own_words() -> None:
    up = Up(worker="raise SystemExit(print('kvrelay: Not enough memory for one sequence.') or 2)")
    with pytest.raises(StartError, match=r"^worker cannot start: Not enough memory for one sequence\.$"):
        up.run(lambda run: run.ready)
    assert up.said == ["Waiting for the gateway to start…"]


def test_a_child_that_never_comes_up_ends_it_after_three_tries() -> None:
    up = Up(worker="raise SystemExit(print('Illegal instruction') or 7)")
    with pytest.raises(StartError) as ended:
        up.run(lambda run: run.ready)
    assert str(ended.value) == (
        "worker cannot start: it ended 3 times before it was up, the last time with exit code 7: Illegal instruction"
    )
    assert sum("started again" in line for line in up.said) == 2


def test_a_child_that_came_up_once_is_started_again_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway stands for any child: it was up and is killed more often than a child that never was may end."""
    monkeypatch.setattr(restart, "LONGEST_DELAY_S", restart.FIRST_DELAY_S)
    up = Up(gateway=GATEWAY.replace("Handler.asked > 3", "False").replace("serve_forever()", "handle_request()"))
    up.run(lambda _: sum("gateway ended" in line for line in up.said) > 3)
    assert sum("gateway ended" in line for line in up.said) > 3


def test_a_child_that_crashes_is_announced_and_started_again() -> None:
    up = Up(worker="raise SystemExit(print('oh') or 7)")
    announced = [
        f"worker ended with exit code 7 and is started again in {delay} s. Its last line: oh"
        for delay in ("0.5", "1.0")
    ]
    up.run(lambda _: set(announced) <= set(up.said))
    assert [line for line in up.said if line in announced] == announced


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_process_in_time(number: signal.Signals) -> None:
    """The whole of `run`, with a sleeping program in place of each child."""
    code = (
        "import sys; from kvrelay import up; from kvrelay.children import ChildSpec\n"
        "spec = ChildSpec('a', [sys.executable, '-c', 'import os, time; print(os.getpid()); time.sleep(600)'], {})\n"
        "up.resolve, up.child_specs = (lambda *_: None), (lambda *_: [spec])\n"
        "sys.exit(up.run(up.UpSettings(port=0)))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        pid = next(pid_lines(process))
        begin = time.monotonic()
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
        assert time.monotonic() - begin < 5.0
        assert not Path(f"/proc/{pid}").exists()


def pid_lines(process: subprocess.Popen[str]) -> Iterator[int]:
    """The process ids that the stand-in child told."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("a | "):
            yield int(line.split()[-1])
