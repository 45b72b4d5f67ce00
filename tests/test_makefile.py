"""`make up`: what is given in capitals reaches `kvrelay up` as variables, whatever it is called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A stand-in for the installed environment, whose `kvrelay` shows how it was called."""
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").touch()
    (binaries / "kvrelay").write_text('#!/bin/sh\necho "$@"\nenv | grep ^KVRELAY_ | sort\nexit 0\n')
    (binaries / "kvrelay").chmod(0o755)
    (tmp_path / "venv" / ".installed").touch()
    return tmp_path / "venv"


def make(venv: Path, *args: str, **variables: str) -> list[str]:
    """The lines that `make up ARGS` prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KVRELAY_", "MAKE"))}
    command = ["make", "-C", str(ROOT), "--no-print-directory", f"VENV={venv}", "up", *args]
    done = subprocess.run(command, env={**environ, **variables}, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_without_options_none_are_passed(venv: Path) -> None:
    assert make(venv, PORT="1", MODEL="x") == ["up"]


def test_options_in_capitals_become_variables(venv: Path) -> None:
    assert make(venv, "PREFILL=2", "PORT=9000", "MODEL=/a b/it's") == [
        "up",
        "KVRELAY_MODEL=/a b/it's",
        "KVRELAY_PORT=9000",
        "KVRELAY_PREFILL=2",
    ]


def test_kvrelay_variables_work_as_they_are(venv: Path) -> None:
    assert make(venv, "KVRELAY_DTYPE=float32", KVRELAY_BOTH="1") == ["up", "KVRELAY_BOTH=1", "KVRELAY_DTYPE=float32"]


def test_makes_own_variables_are_no_options(venv: Path) -> None:
    assert make(venv, "ARGS=-x", "PYTHON=python3") == ["up"]


def test_a_gpu_check_without_a_gpu_fails_and_runs_nothing(venv: Path) -> None:
    (venv / ".installed-dev").touch()
    for name, body in (("python", "echo no GPU >&2; exit 1"), ("pytest", "echo ran")):
        (venv / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (venv / "bin" / name).chmod(0o755)
    command = ["make", "-C", str(ROOT), "--no-print-directory", f"VENV={venv}", "gpu-check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "no GPU" in done.stderr
    assert "ran" not in done.stdout


def test_what_args_say_wins_over_how_the_tests_are_shared(venv: Path) -> None:
    (venv / ".installed-dev").touch()
    (venv / "bin" / "pytest").write_text('#!/bin/sh\necho "$@"\n')
    (venv / "bin" / "pytest").chmod(0o755)
    command = ["make", "-s", "-C", str(ROOT), "--no-print-directory", f"VENV={venv}", "ARGS=-n 0 -k x", "test"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("-m not soak -n 2 ")
    assert done.stdout.endswith(" -n 0 -k x\n")


def test_an_installation_shows_what_is_fetched_and_that_it_installs() -> None:
    said = (
        "Obtaining file:///here\n  Installing build dependencies: started\n"
        "Collecting numpy\n  Using cached numpy-2.whl (16 MB)\n  Downloading idna-3.whl (71 kB)\n"
        "Processing /srv/wheels/torch-2.whl\nProcessing ./a.whl\nRequirement already satisfied: pip\n"
        "Installing collected packages: numpy, idna, torch\nSuccessfully installed numpy-2\n"
    )
    command = ["make", "-s", "-C", str(ROOT), "--no-print-directory", "--eval", "filter:; @$(SHOW_PROGRESS)", "filter"]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "  numpy-2.whl (16 MB)",
        "  idna-3.whl (71 kB)",
        "  torch-2.whl",
        "  a.whl",
        "  Installing all of these; this takes a while.",
    ]
