"""`kvrelay verify` between gateways on paper: what it finds, shows and writes, and its exit codes."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli import main
from tests.bench.fake_gateway import Lie, gateway

REQUESTS = 80


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVRELAY_URL", "KVRELAY_AGAINST", "KVRELAY_LOCAL", "KVRELAY_ARMS", "KVRELAY_JSON"):
        monkeypatch.delenv(name, raising=False)


def verify(url: str, against: str, *options: str) -> int:
    return main(["verify", f"--url={url}", f"--against={against}", f"--requests={REQUESTS}", *options])


def on_the_nth(number: int, lie: Lie) -> Lie:
    """Lies in one of its answers."""
    count = itertools.count()

    def once(asked: dict[str, Any], answer: dict[str, Any]) -> None:
        if next(count) == number:
            lie(asked, answer)

    return once


def in_a_token(_asked: dict[str, Any], answer: dict[str, Any]) -> None:
    answer["choices"][0]["token_ids"][-1] ^= 1


def in_a_bit(_asked: dict[str, Any], answer: dict[str, Any]) -> None:
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    logprobs[-1] = math.nextafter(logprobs[-1], 0)


def in_a_bit_of_another_token(_asked: dict[str, Any], answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["top_logprobs"][-1]["token_id:0"] = math.nextafter(-2.5, 0)


def in_the_number_of_logprobs(_asked: dict[str, Any], answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["token_logprobs"].pop()


def by_failing(_asked: dict[str, Any], answer: dict[str, Any]) -> None:
    answer["error"] = {"message": "It broke."}


def test_the_same_answers_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gateway() as a, gateway() as b:
        assert verify(a, b, f"--json={tmp_path / 'out.json'}", "--seed=7") == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["requests"], record["mismatches"], record["seed"]) == (2 * REQUESTS, 0, 7)
    assert record["settings"]["against"] == b
    assert record["commit"]
    first, second = record["arms"]
    assert (first["name"], second["name"]) == (a, b)
    assert first["requests"] == second["requests"] == second["compared"] == REQUESTS
    assert 0 < first["compared"] < REQUESTS
    assert second["first_difference"] is None
    assert second["cached_tokens"] == 3 * REQUESTS
    shown = capsys.readouterr()
    assert "mismatches" in shown.out
    assert f"{b}: {REQUESTS} requests, 0 mismatches" in shown.err


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (in_a_token, "not"),
        (in_a_bit, "logprob"),
        (in_a_bit_of_another_token, "other likeliest tokens"),
        (in_the_number_of_logprobs, "not what a completion with logprobs looks like"),
        (by_failing, "It broke."),
    ],
)
@pytest.mark.parametrize("number", [0, 41])
def test_one_lie_is_found(tmp_path: Path, lie: Lie, words: str, number: int) -> None:
    with gateway() as a, gateway(on_the_nth(number, lie)) as b:
        assert verify(a, b, f"--json={tmp_path / 'out.json'}") == 1
    record = json.loads((tmp_path / "out.json").read_text())
    assert [arm["mismatches"] for arm in record["arms"]] == [0, 1]
    assert words in record["arms"][1]["first_difference"]["what"]


def test_a_gateway_that_contradicts_itself_is_found() -> None:
    """Asked once more, alone or among others, with its prompt cached by now."""
    answered = set[str]()

    def in_what_it_said_before(asked: dict[str, Any], answer: dict[str, Any]) -> None:
        if (question := json.dumps(asked)) in answered:
            in_a_bit(asked, answer)
        answered.add(question)

    with gateway(in_what_it_said_before) as a, gateway() as b:
        assert verify(a, b) == 1


def test_json_on_stdout_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway() as a:
        assert verify(a, a, "--json=-") == 0
    assert json.loads(capsys.readouterr().out)["mismatches"] == 0


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["verify", *args]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_wrong_use_is_said_and_exits_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    assert "--local" in refused(capsys)
    assert "--against" in refused(capsys, f"--against={url}", "--local")
    assert "--arms" in refused(capsys, f"--against={url}", "--arms=both")
    assert "--requests" in refused(capsys, f"--against={url}", "--requests=0")
    assert "did you mean chunk-64?" in refused(capsys, "--local", "--arms=chunk-46")
    assert f"No gateway answers at {url}" in refused(capsys, f"--url={url}", f"--against={url}")
    with gateway() as a, gateway(ready=False, reason="No worker is there.") as b, gateway(fingerprint="g") as c:
        assert "No worker is there." in refused(capsys, f"--url={a}", f"--against={b}")
        assert "different models" in refused(capsys, f"--url={a}", f"--against={c}")
        missing = f"--json={tmp_path / 'none' / 'out.json'}"
        assert "cannot be written" in refused(capsys, f"--url={a}", f"--against={a}", missing)
