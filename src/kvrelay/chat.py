"""`kvrelay chat`: a conversation in the terminal, streamed. With piped input, every line is a message."""

import importlib.util
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, TextIO

import httpx

from kvrelay.client import GatewayError, connect, get_json, refusal, unreachable
from kvrelay.config import ChatSettings
from kvrelay.terminal import WordWrap, unechoed

_DATA = "data:"
_DONE = "[DONE]"
_HELP = "Ctrl-C stops an answer, /reset starts over, /exit or Ctrl-D ends.\n"
_COMMAND = re.compile(r"/\w*(?=\s|$)")  # not /a/path
_READ_TIMEOUT_S = 600.0
_UNSAFE = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd") | {0x9: "\t", 0xA: "\n"}  # could drive a terminal


def run(settings: ChatSettings) -> int:
    """Chats until the input ends or /exit. Gives 1 if the gateway cannot be reached or, with piped input, said no."""
    interactive = _prepare_terminal()
    try:
        with connect(settings.url, timeout_s=_READ_TIMEOUT_S) as client:
            model = settings.model or served_model(client)
            if interactive:
                sys.stdout.write(f"{model} at {settings.url}\n{_HELP}")
            chat = Chat(client, model, settings, sys.stdout, stoppable=interactive, wraps=sys.stdout.isatty())
            failures = chat.converse(_lines(interactive))
    except GatewayError as error:
        sys.stderr.write(f"kvrelay: {error}\n")
        return 1
    return 1 if failures and not interactive else 0


def served_model(client: httpx.Client) -> str:
    """The model that the gateway serves. Raises GatewayError if that cannot be learned."""
    listed = get_json(client, "/v1/models").get("data")
    if not isinstance(listed, list) or not listed:
        raise GatewayError(f"What answers at {client.base_url} lists no models; check --url, or name one with --model.")
    return str(listed[0]["id"])


class Chat:
    """One conversation: its history and where it is shown."""

    def __init__(
        self,
        client: httpx.Client,
        model: str,
        settings: ChatSettings,
        out: TextIO,
        *,
        stoppable: bool = True,
        wraps: bool = False,
    ) -> None:
        """`stoppable`: Ctrl-C ends an answer only, because somebody is there to go on.

        `wraps`: lines break between words at the terminal's width.
        """
        self._client = client
        self._options = settings.model_dump(include={"max_tokens", "temperature", "seed"}, exclude_none=True)
        self._model = model
        self._system = settings.system
        self._out = out
        self._stoppable = stoppable
        self._wraps = wraps
        self._laid_out: Callable[[str], str] = str
        self._messages = self._opening()

    def converse(self, lines: Iterable[str]) -> int:
        """Answers line by line until the lines end or say /exit. Gives the number of answers that failed."""
        failures = 0
        for line in lines:
            if line == "/exit":
                break
            if line == "/reset":
                self._messages = self._opening()
                self._out.write("The conversation starts over.\n")
            elif command := _COMMAND.match(line):
                self._out.write(f"There is no command {command[0]}; /reset starts over, /exit ends.\n")
                failures += 1
            elif line:
                with unechoed():
                    failures += not self._answer(line)
        return failures

    def _opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _answer(self, line: str) -> bool:
        """Streams one answer. What failed or was stopped before its first word leaves no trace in the history."""
        messages = [*self._messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        self._laid_out = WordWrap(shutil.get_terminal_size().columns) if self._wraps else str
        try:
            with closing(self._stream(messages)) as stream:
                for piece in stream:
                    pieces.append(piece)
                    self._show(piece)
        except KeyboardInterrupt:
            if not self._stoppable:
                raise
            self._show(" [stopped]")
        except GatewayError as error:
            self._show(f"\n{error}\n" if pieces else f"{error}\n")
            return False
        self._show("\n")
        if pieces:
            self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return True

    def _show(self, text: str) -> None:
        self._out.write(self._laid_out(text.translate(_UNSAFE)))
        self._out.flush()

    def _stream(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        body = {"model": self._model, "messages": messages, "stream": True, **self._options}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise GatewayError(refusal(response.status_code, response.read()))
                yield from texts(response.iter_lines())
        except httpx.HTTPError as error:
            raise unreachable(self._client, error) from error


def texts(lines: Iterable[str]) -> Iterator[str]:
    """The pieces of text in a stream of server-sent events. Raises GatewayError for an error or a missing end."""
    for line in lines:
        if not line.startswith(_DATA):
            continue
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            return
        if piece := _text(_event(data)):
            yield piece
    raise GatewayError("The answer broke off before its end.")


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise GatewayError(f"The gateway sent an event that is not JSON: {data[:80]!r}.") from error
    if "error" in event:
        raise GatewayError(str(event["error"].get("message", event["error"])))
    return dict(event)


def _text(event: dict[str, Any]) -> str:
    return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))


def _prepare_terminal() -> bool:
    """Makes text that the terminal's encoding lacks harmless, and a prompt editable. Tells whether a person types."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if sys.stdin.isatty() and importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # gives input() its line editing
    return sys.stdin.isatty()


def _lines(interactive: bool) -> Iterator[str]:
    """What the user says, line by line. Ctrl-C at the prompt only drops the line, as in a shell."""
    while True:
        try:
            yield (input("> ") if interactive else input()).strip()
        except EOFError:
            if interactive:
                sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            sys.stdout.write("\n")
