"""`kvrelay status`: the bottleneck it names, the table it draws, and what it says when there is nothing to draw."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvrelay.config import StatusSettings
from kvrelay.errors import StartError
from kvrelay.gateway.cluster import Cluster
from kvrelay.messages import Ledger, WorkerHello, WorkerLoad, WorkerStatus
from kvrelay.status import bottleneck, render, run
from kvrelay.types import KVLayout, Role

FINGERPRINT = "f" * 64
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
IDLE = WorkerLoad()
POLL_S = 0.01  # in which the server notices that it shall end


def ledger(leased: int) -> Ledger:
    """A thousand blocks, so many of them leased and a few in each other state."""
    return Ledger(total=1000, free=1000 - leased - 30, cached=20, leased=leased, revoked=10)


def snapshot(*workers: tuple[str, int, WorkerLoad], fingerprint: str = FINGERPRINT) -> dict[str, Any]:
    """What `/cluster` says with these workers (name, leased blocks, load): the gateway's own words."""
    cluster = Cluster("smollm2-135m", FINGERPRINT, death_s=2.0)
    for incarnation, (name, leased, load) in enumerate(workers, start=1):
        cluster.on_hello(hello(name, incarnation, fingerprint), now=0.0)
        cluster.on_status(WorkerStatus(source=incarnation, ledger=ledger(leased), load=load), now=0.0)
    described: dict[str, Any] = json.loads(json.dumps(cluster.snapshot(now=0.34)))
    return described


def hello(name: str, incarnation: int, fingerprint: str = FINGERPRINT) -> WorkerHello:
    """A worker that introduces itself; its role is in its name."""
    return WorkerHello(
        source=incarnation,
        name=name,
        role=Role(name.partition("-")[0]),
        control_endpoint=f"tcp://127.0.0.1:{incarnation}",
        data_endpoints={"zmq": f"tcp://127.0.0.1:{incarnation + 1000}"},
        model="smollm2-135m",
        fingerprint=fingerprint,
        max_model_len=2048,
        vocab_size=49152,
        max_num_seqs=64,
        layout=LAYOUT,
        device="cpu",
        pid=incarnation,
        host="here",
    )


def drawn(of: dict[str, Any], width: int = 120) -> list[str]:
    """The lines of the screen."""
    console = Console(file=io.StringIO(), width=width)
    console.print(render(of, "http://gateway:8000"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ((100, IDLE), (100, IDLE), ""),
        ((100, IDLE), (960, IDLE), "decode (KV blocks 97 % in use)"),
        ((100, IDLE), (100, WorkerLoad(num_running=62)), "decode (places for sequences 97 % in use)"),
        ((100, IDLE), (100, WorkerLoad(num_offers=3)), "decode (3 requests wait)"),
        ((950, IDLE), (100, IDLE), "prefill (KV blocks 96 % in use)"),
        ((100, WorkerLoad(num_waiting=1)), (100, IDLE), "prefill (1 request waits)"),
        ((100, WorkerLoad(num_running=5, num_held=9)), (100, WorkerLoad(num_running=50)), ""),
    ],
)
def test_bottleneck(prefill: tuple[int, WorkerLoad], decode: tuple[int, WorkerLoad], expected: str) -> None:
    assert bottleneck(snapshot(("prefill-0", *prefill), ("decode-0", *decode))) == expected


def test_a_full_decode_pool_is_named_and_not_the_prefill_pool_that_queues_behind_it() -> None:
    full = snapshot(("prefill-0", 950, WorkerLoad(num_waiting=40)), ("decode-0", 960, IDLE))
    assert bottleneck(full).startswith("decode")


def test_bottleneck_is_about_a_pool_and_not_its_busiest_worker() -> None:
    assert bottleneck(snapshot(("decode-0", 960, IDLE), ("decode-1", 100, IDLE))) == ""


def test_a_worker_before_its_first_heartbeat_is_shown_and_not_judged() -> None:
    cluster = Cluster("smollm2-135m", FINGERPRINT, death_s=2.0)
    cluster.on_hello(hello("decode-0", 1), now=0.0)
    silent = cluster.snapshot(now=0.1)
    assert bottleneck(silent) == ""
    assert drawn(silent)[2].split() == ["decode-0", "decode", "unused", "0", "0", *"-----", "0%", "0.1s"]


def test_the_table() -> None:
    busy = WorkerLoad(num_running=32, num_waiting=2, num_offers=1)
    lines = drawn(snapshot(("prefill-0", 100, IDLE), ("decode-0", 960, busy)), width=80)
    assert lines[0] == "http://gateway:8000 serves smollm2-135m and is ready"
    assert lines == [line.rstrip() for line in lines]
    assert [" ".join(line.split()) for line in lines[1:4]] == [
        "name role state run wait free cached leased revoked total load beat",
        "decode-0 decode serving 32 3 10 20 960 10 1000 50% 0.3s",
        "prefill-0 prefill serving 0 0 870 20 100 10 1000 0% 0.3s",
    ]
    assert lines[4:] == ["bottleneck: decode (KV blocks 97 % in use)"]


def test_names_with_brackets_are_shown_as_they_are() -> None:
    """A terminal's markup must not swallow what another machine calls itself."""
    strange = snapshot(("both-[red]x[/]", 100, IDLE))
    assert "both-[red]x[/]" in "\n".join(drawn(strange))


def test_why_workers_are_unused_and_who_was_lost() -> None:
    cluster = Cluster("smollm2-135m", FINGERPRINT, death_s=2.0)
    cluster.on_hello(hello("prefill-0", 1), now=0.0)
    cluster.on_hello(hello("decode-0", 2, fingerprint="a" * 64), now=0.0)
    cluster.on_hello(hello("decode-1", 3), now=0.0)
    cluster.on_lost(3, now=1.0)
    text = "\n".join(drawn(cluster.snapshot(now=4.0), width=400))
    assert "is not ready" in text
    assert "No worker can serve yet. prefill-0 waits for a decode worker. decode-0 serves smollm2-135m (aaaaaa" in text
    assert text.count("waits for") == 1
    assert "lost 3 s ago: decode-1, its connection was lost" in text
    assert "bottleneck" not in text


def test_a_worker_that_is_back_is_not_shown_as_lost() -> None:
    cluster = Cluster("smollm2-135m", FINGERPRINT, death_s=2.0)
    for incarnation, name in enumerate(("decode-0", "decode-1"), start=1):
        cluster.on_hello(hello(name, incarnation), now=0.0)
        cluster.on_lost(incarnation, now=1.0)
    cluster.on_hello(hello("decode-0", 3), now=2.0)
    assert drawn(cluster.snapshot(now=4.0))[-1] == "lost 3 s ago: decode-1, its connection was lost"
    assert "decode-0, its" not in "\n".join(drawn(cluster.snapshot(now=4.0)))


def test_without_workers_there_is_a_sentence_and_no_table() -> None:
    assert drawn(snapshot()) == [
        "http://gateway:8000 serves smollm2-135m and is not ready",
        "No worker has registered; start a prefill and a decode worker.",
    ]


def test_an_unused_worker_of_a_cluster_that_serves_says_why() -> None:
    cluster = Cluster("smollm2-135m", FINGERPRINT, death_s=2.0)
    cluster.on_hello(hello("both-0", 1), now=0.0)
    cluster.on_hello(hello("decode-0", 2), now=0.0)
    assert drawn(cluster.snapshot(now=1.0))[-1] == "decode-0: It waits for a prefill worker."


def test_the_table_fits_80_columns_without_cutting_a_heading() -> None:
    busy = WorkerLoad(num_running=64, num_waiting=512)
    large = snapshot(("prefill-12345678", 100, busy), ("decode-0", 960, busy))
    for worker in large["workers"]:
        worker["draining"] = True
        worker["ledger"] = dict.fromkeys(worker["ledger"], 12345)
    lines = drawn(large, width=80)
    assert max(map(len, lines)) <= 80
    headings = "name role state run wait free cached leased revoked total load beat"
    assert " ".join(lines[1].split()) == headings
    assert "".join(line.split()[0] for line in lines[3:5]) == "prefill-12345678"


@pytest.fixture
def url() -> Iterator[str]:
    """A gateway whose `/cluster` is ready."""
    yield from serving(json.dumps(snapshot(("prefill-0", 100, IDLE), ("decode-0", 960, IDLE))), status=200)


def serving(body: str, status: int) -> Iterator[str]:
    """The address of an HTTP server with one answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[POLL_S])
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_prints_the_table_and_writes_the_figures(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "status.json"
    assert run(StatusSettings(url=url, json_file=file)) == 0
    assert "bottleneck: decode (KV blocks 97 % in use)" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["bottleneck"] == "decode (KV blocks 97 % in use)"
    assert figures["settings"]["url"] == url
    assert len(figures["cluster"]["workers"]) == 2


def test_a_dash_writes_the_figures_to_stdout_and_nothing_else(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(StatusSettings(url=url, json_file=Path("-"))) == 0
    assert len(json.loads(capsys.readouterr().out)["cluster"]["workers"]) == 2


def test_ctrl_c_is_how_watching_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvrelay.status.time.sleep", interrupted)
    assert run(StatusSettings(url=url, watch=True)) == 0


def test_a_file_that_cannot_be_written_is_said(url: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file or directory; give --json another file"):
        run(StatusSettings(url=url, json_file=tmp_path / "none" / "status.json"))


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ("hello", 200, "is no KVRelay gateway; check --url."),
        ("[]", 200, "is no KVRelay gateway; check --url."),
        ('{"error": {"message": "The gateway drains."}}', 503, "The gateway drains. (HTTP status 503)"),
        ("<html>", 502, "The gateway answered with HTTP status 502."),
    ],
)
def test_other_answers_are_a_sentence_and_exit_code_1(
    body: str, status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in serving(body, status):
        assert run(StatusSettings(url=url)) == 1
    assert sentence in capsys.readouterr().err


def test_a_cluster_that_is_not_ready_gives_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    for url in serving(json.dumps(snapshot(("decode-0", 100, IDLE))), 200):
        assert run(StatusSettings(url=url)) == 1
    assert "No worker can serve yet. decode-0 waits for a prefill worker." in capsys.readouterr().out
