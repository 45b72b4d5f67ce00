"""The command as a user starts it: real processes, their exit codes and what they print."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cli import COMMANDS, main
from kvrelay.placement import place

TIMEOUT_S = 60


def kvrelay(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `kvrelay ARGS` with no KVRELAY_* variables but those given."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    command = [sys.executable, "-m", "kvrelay", *args]
    return subprocess.run(
        command, env={**environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that has these words."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("kvrelay: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_help_lists_the_commands() -> None:
    for args in ((), ("--help",), ("-h",)):
        done = kvrelay(*args)
        assert done.returncode == 0
        for name, command in COMMANDS.items():
            assert f"\n  {name}" in done.stdout
            assert (command.settings_type.__doc__ or "").split("\n")[0] in done.stdout


def test_help_of_a_command() -> None:
    done = kvrelay("prefill", "--help")
    assert done.returncode == 0
    assert "--max-batch-tokens NUMBER" in done.stdout
    assert "--role prefill" in done.stdout


def test_version() -> None:
    assert kvrelay("--version").stdout == "kvrelay 0.1.0\n"


def test_wrong_use_is_one_line_and_exit_code_2() -> None:
    assert_refused(kvrelay("serve"), "no command 'serve'")
    assert_refused(kvrelay("statsu"), "did you mean status?")
    assert_refused(kvrelay("gateway", "--bogus", "1"), "Unknown option --bogus", "kvrelay gateway --help")
    assert_refused(kvrelay("decode", "--core", "x", "--dtype", "int4"), "--core", "whole number", "--dtype", "bfloat16")
    assert_refused(kvrelay("up", KVRELAY_PORT="x"), "KVRELAY_PORT", "whole number")
    assert_refused(kvrelay("up", KVRELAY_PROT="1"), "KVRELAY_PROT", "did you mean KVRELAY_PORT?")


def test_a_start_that_cannot_work_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    assert_refused(kvrelay("up", "--model", str(tmp_path / "none"), "--cache-dir", str(tmp_path)), "none", "--model")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and no more")
    assert_refused(kvrelay("up", "--model", str(tmp_path / "broken.gguf"), "--cache-dir", str(tmp_path)), "broken.gguf")


def test_a_client_without_a_gateway_says_so_and_exits_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for command in ("status", "chat"):
        done = kvrelay(command, KVRELAY_URL=f"http://127.0.0.1:{port}")
        assert done.returncode == 1
        assert f"No gateway answers at http://127.0.0.1:{port}" in done.stderr
        assert "or name another address with --url" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error() -> None:
    """`kvrelay up --help | head -1` leaves no traceback."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "kvrelay", "up", "--help"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    os.close(write_end)
    assert done.stderr == ""


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_settings: object) -> int:
        raise KeyboardInterrupt

    for name in [name for name in os.environ if name.startswith("KVRELAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("kvrelay.status.run", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_worker_is_placed_before_torch_can_see_the_machine() -> None:
    """In a process of its own, since it changes its affinity: core 1,000 is taken modulo the usable ones."""
    code = (
        "import os, sys; from kvrelay.placement import place; usable = sorted(os.sched_getaffinity(0));"
        "count = place(1000, None); assert os.sched_getaffinity(0) == {usable[1000 % len(usable)]};"
        "assert count == 1 and os.environ['OMP_NUM_THREADS'] == '1'; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_follow_the_option_and_else_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "77")
    assert place(None, 3) == 3
    assert os.environ["MKL_NUM_THREADS"] == "3"
    assert place(None, None) == len(os.sched_getaffinity(0))


def test_the_command_line_itself_does_not_import_torch() -> None:
    code = "import sys, kvrelay.cli, kvrelay.up, kvrelay.status, kvrelay.chat; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, check=False).returncode == 0
