"""A gateway on paper: its answers follow from the questions, and it can lie."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32

VOCAB_SIZE = 1000
Lie = Callable[[dict[str, Any], dict[str, Any]], None]  # gets the request and the answer, which it may change


def honest_answer(body: dict[str, Any]) -> dict[str, Any]:
    """A completion whose tokens and logprobs are a function of everything that was asked."""
    seed = crc32(json.dumps(body, sort_keys=True).encode())
    token_ids = [crc32(f"{seed} {index}".encode()) % VOCAB_SIZE for index in range(body["max_tokens"])]
    logprobs = [-1.0 / (1 + token_id) for token_id in token_ids]
    told = {
        "token_logprobs": logprobs,
        "top_logprobs": [{f"token_id:{token_id}": -1.0 / (1 + token_id), "token_id:0": -2.5} for token_id in token_ids],
    }
    return {
        "choices": [{"token_ids": token_ids, "finish_reason": "length", "logprobs": told}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
    }


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that come at once


@contextmanager
def gateway(lie: Lie = lambda _asked, _answer: None, **changes: Any) -> Iterator[str]:
    """Yields the URL of one that lies as told; `changes` are those of what it says of its cluster."""
    worker = {"vocab_size": VOCAB_SIZE, "counters": {"preempted": 2}}
    cluster = {"model": "m", "fingerprint": "f", "ready": True, "reason": "", "max_model_len": 200, "workers": [worker]}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, cluster | changes)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = honest_answer(body)
            lie(body, answer)
            self._send(500 if "error" in answer else 200, answer)

        def _send(self, status: int, content: dict[str, Any]) -> None:
            raw = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None: ...

    with _Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
