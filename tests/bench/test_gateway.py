"""The benchmark of a gateway alone: real processes, real sockets, and ages that are told by token ids."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.bench.standin import WINDOW_US, age_us, token_made_at
from tests.places import CACHE_DIR


@pytest.mark.parametrize("age", [0, 1, 12_345, WINDOW_US - 1])
@pytest.mark.parametrize("made_us", [0, 39_999, 123_456_789])
def test_a_token_tells_its_age(made_us: int, age: int) -> None:
    made_s, now_s = (made_us + 0.5) / 1e6, (made_us + age + 0.5) / 1e6
    assert age_us(token_made_at(made_s), now_s) == age


def test_every_token_is_counted(tmp_path: Path) -> None:
    figures = tmp_path / "gateway.json"
    load = ["--concurrency", "1", "3", "--rounds", "2", "--input-len", "5", "--output-len", "4"]
    places = ["--cache-dir", str(CACHE_DIR), "--json", str(figures)]
    command = [sys.executable, "-m", "kvrelay.bench.gateway", *load, *places]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    rows = json.loads(figures.read_text())["rows"]
    assert [(row["at_a_time"], row["tokens"]) for row in rows] == [(1, 8), (3, 24)]
    assert all(0 < row["latency_p50_us"] < WINDOW_US for row in rows)
