"""`kvrelay chat` against a real HTTP server that streams, by function and as a process with piped input."""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvrelay.chat import Chat, served_model, texts
from kvrelay.client import GatewayError, connect
from kvrelay.config import ChatSettings

TIMEOUT_S = 60
POLL_S = 0.01  # in which the server notices that it shall end


class Server(ThreadingHTTPServer):
    """Streams the words of the last message back, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One request; the words `refuse`, `break` and `fail` in the last message do what they say."""

    server: Server

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        words = body["messages"][-1]["content"].split()
        if "refuse" in words:
            self._json(400, {"error": {"message": "The prompt is too long."}})
            return
        self.send_response(200)
        self.end_headers()
        self._event({"choices": [{"delta": {"role": "assistant"}}]})
        for word in words:
            self._event({"choices": [{"delta": {"content": f"{word} "}, "finish_reason": None}]})
        if "fail" in words:
            self._event({"error": {"message": "A worker died."}})
        if "break" not in words:
            self.wfile.write(b": comment\n\ndata: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _json(self, status: int, content: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *args: object) -> None:
        """Nothing to say."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A running server."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=[POLL_S])
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def converse(server: Server, *lines: str, **settings: Any) -> tuple[str, int]:
    """What a conversation shows, and how many answers failed."""
    out = io.StringIO()
    with connect(server.url) as client:
        failures = Chat(client, "served", ChatSettings(url=server.url, **settings), out).converse(lines)
    return out.getvalue(), failures


def test_answers_stream_and_the_history_grows(server: Server) -> None:
    shown, failures = converse(server, "one two", "three")
    assert (shown, failures) == ("one two \nthree \n", 0)
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "one two "},
        {"role": "user", "content": "three"},
    ]


def test_options_reach_the_server(server: Server) -> None:
    converse(server, "hi", system="Be brief.", max_tokens=7, temperature=0.0, seed=3)
    assert server.bodies[0] == {
        "model": "served",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": 7,
        "temperature": 0.0,
        "seed": 3,
    }
    converse(server, "hi")
    assert "seed" not in server.bodies[1]


def test_reset_forgets_all_but_the_system_message(server: Server) -> None:
    shown, _ = converse(server, "one", "/reset", "two", system="Be brief.")
    assert "The conversation starts over." in shown
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["Be brief.", "two"]


def test_exit_ends_and_empty_lines_are_skipped(server: Server) -> None:
    assert converse(server, "", "/exit", "one") == ("", 0)
    assert server.bodies == []


@pytest.mark.parametrize("line", ["/foo", "/foo bar", "/"])
def test_an_unknown_command_is_not_sent(server: Server, line: str) -> None:
    shown = f"There is no command {line[:4].rstrip()}; /reset starts over, /exit ends.\n"
    assert converse(server, line) == (shown, 1)
    assert server.bodies == []


def test_a_path_is_no_command(server: Server) -> None:
    assert converse(server, "/etc/hosts is what") == ("/etc/hosts is what \n", 0)


def test_answers_break_between_words_in_a_terminal(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    out = io.StringIO()
    with connect(server.url) as client:
        Chat(client, "served", ChatSettings(url=server.url), out, wraps=True).converse(["one two three four", "five"])
    assert out.getvalue() == "one two\nthree four\nfive\n"
    assert server.bodies[1]["messages"][1]["content"] == "one two three four "


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("refuse", "The prompt is too long. (HTTP status 400)\n"),
        ("fail", "fail \nA worker died.\n"),
        ("break", "break \nThe answer broke off before its end.\n"),
    ],
)
def test_errors_are_sentences_and_leave_no_trace_in_the_history(server: Server, line: str, shown: str) -> None:
    assert converse(server, line, "one") == (f"{shown}one \n", 1)
    assert len(server.bodies[1]["messages"]) == 1


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(server: Server) -> None:
    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            if text == "two ":
                raise KeyboardInterrupt
            return super().write(text)

    out = Impatient()
    with connect(server.url) as client:
        Chat(client, "served", ChatSettings(url=server.url), out).converse(["one two three", "four"])
    assert out.getvalue() == "one  [stopped]\nfour \n"
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "one two "}


def test_what_could_drive_the_terminal_is_made_visible(server: Server) -> None:
    assert converse(server, "a\x1b[31mb\u009bc")[0] == "a\ufffd[31mb\ufffdc \n"


def test_the_model_is_the_one_that_is_served(server: Server) -> None:
    with connect(server.url) as client:
        assert served_model(client) == "served"


def test_an_event_that_is_no_json_is_said() -> None:
    with pytest.raises(GatewayError, match=r"not JSON: '\{half'"):
        list(texts(["data: {half"]))


def chat(server_url: str, given: bytes, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `kvrelay chat` with piped input."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    return subprocess.run(
        [sys.executable, "-m", "kvrelay", "chat", "--url", server_url],
        input=given,
        env={**environ, **variables},
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_piped_lines_are_answered_without_prompts(server: Server) -> None:
    done = chat(server.url, b"one two\n\nlast", PYTHONUTF8="1")
    assert (done.stdout, done.stderr, done.returncode) == (b"one two \nlast \n", b"", 0)
    assert server.bodies[0]["model"] == "served"


def test_piped_text_in_no_known_encoding_does_no_harm(server: Server) -> None:
    done = chat(server.url, b"a\xffb \xf0\x9f\x98\x80\n", PYTHONUTF8="0", LC_ALL="C", PYTHONCOERCECLOCALE="0")
    assert (done.stderr, done.returncode) == (b"", 0)


def test_a_failed_answer_shows_in_the_exit_code_of_a_script(server: Server) -> None:
    done = chat(server.url, b"refuse\n")
    assert (done.stdout, done.returncode) == (b"The prompt is too long. (HTTP status 400)\n", 1)


def test_ctrl_c_ends_a_conversation_that_nobody_types(server: Server) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    with connect(server.url) as client, pytest.raises(KeyboardInterrupt):
        Chat(client, "served", ChatSettings(url=server.url), Interrupted(), stoppable=False).converse(["one", "two"])
    assert len(server.bodies) == 1
