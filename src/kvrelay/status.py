"""`kvrelay status`: the pools of a running cluster as a table, and the resource that limits it."""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.client import GatewayError, connect, get_json
from kvrelay.config import STDOUT, StatusSettings
from kvrelay.errors import StartError

_REFRESH_S = 1.0
_FULL = 0.9  # share of a resource from which on it limits its pool
_DOWNSTREAM_FIRST = ("decode", "both", "prefill")  # a full pool makes the one before it queue, not the other way round
_COLUMNS = ("name", "role", "state", "run", "wait", "free", "cached", "leased", "revoked", "total", "load", "beat")
_TEXT_COLUMNS = 3
_PIPED_WIDTH = 200


def run(settings: StatusSettings) -> int:
    """Shows the cluster once, or until Ctrl-C. Gives 1 if it cannot be reached or is not ready."""
    try:
        with connect(settings.url) as client:
            if settings.watch:
                return _watch(client, settings)
            return _show(get_json(client, "/cluster"), settings)
    except GatewayError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"kvrelay: {error}"))
        return 1


def _watch(client: httpx.Client, settings: StatusSettings) -> int:
    with suppress(KeyboardInterrupt), Live(console=_console(), auto_refresh=False) as live:
        while True:
            snapshot = get_json(client, "/cluster")
            _save(snapshot, settings)
            live.update(render(snapshot, settings.url), refresh=True)
            time.sleep(_REFRESH_S)
    return 0


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)


def _show(snapshot: Mapping[str, Any], settings: StatusSettings) -> int:
    _save(snapshot, settings)
    if settings.json_file != STDOUT:
        _console().print(render(snapshot, settings.url))
    return 0 if snapshot["ready"] else 1


def _save(snapshot: Mapping[str, Any], settings: StatusSettings) -> None:
    if settings.json_file is not None:
        figures = {"bottleneck": bottleneck(snapshot), "cluster": snapshot}
        origin = {"version": version("kvrelay"), "settings": settings.model_dump(mode="json")}
        text = json.dumps({**origin, **figures}, indent=2) + "\n"
        if settings.json_file == STDOUT:
            sys.stdout.write(text)
        else:
            _write(settings.json_file, text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise StartError(f"{path} cannot be written: {error.strerror}; give --json another file.") from error


def bottleneck(snapshot: Mapping[str, Any]) -> str:
    """What limits the cluster, such as "decode (KV blocks 97 % in use)"; empty while every pool has room."""
    for role in _DOWNSTREAM_FIRST:
        workers = [worker for worker in snapshot["workers"] if worker["role"] == role and worker["ledger"]]
        if workers and (reason := _limit(workers)):
            return f"{role} ({reason})"
    return ""


def _limit(workers: list[Mapping[str, Any]]) -> str:
    """What limits a pool: memory, then places in a step, then time."""
    taken = _sum(workers, "ledger", "leased", "revoked") / max(_sum(workers, "ledger", "total"), 1)
    running = _sum(workers, "load", "num_running") / sum(worker["max_num_seqs"] for worker in workers)
    waiting = _sum(workers, "load", "num_waiting", "num_offers")
    if taken >= _FULL:
        return f"KV blocks {100 * taken:.0f} % in use"
    if running >= _FULL:
        return f"places for sequences {100 * running:.0f} % in use"
    return f"{waiting} {'request waits' if waiting == 1 else 'requests wait'}" if waiting else ""


def _sum(workers: list[Mapping[str, Any]], part: str, *names: str) -> int:
    return sum(int(worker[part][name]) for worker in workers for name in names)


def render(snapshot: Mapping[str, Any], url: str) -> RenderableType:
    """The screen: what is served where, the table, what limits the cluster or keeps it from serving, and losses."""
    state = "ready" if snapshot["ready"] else "not ready"
    head = Text(f"{url} serves {snapshot['model']} and is {state}", style="bold")
    table = [_table(snapshot)] if snapshot["workers"] else []
    return Group(head, *table, *_remarks(snapshot), *_losses(snapshot))


def _remarks(snapshot: Mapping[str, Any]) -> list[Text]:
    """What limits it and why workers are unused; when no worker can serve, the gateway's reason says it all."""
    if not snapshot["ready"]:
        return [Text(str(snapshot["reason"]), style="yellow")]
    unused = [Text(f"{worker['name']}: {worker['reason']}") for worker in snapshot["workers"] if worker["reason"]]
    return [Text(f"bottleneck: {bottleneck(snapshot) or 'none, every pool has room'}"), *unused]


def _losses(snapshot: Mapping[str, Any]) -> list[Text]:
    """The newest losses of workers that are not back."""
    present = {worker["name"] for worker in snapshot["workers"]}
    missing = [loss for loss in snapshot["lost"] if loss["name"] not in present]
    return [Text(f"lost {loss['ago_s']:.0f} s ago: {loss['name']}, {loss['reason']}") for loss in missing[-3:]]


def _table(snapshot: Mapping[str, Any]) -> Table:
    table = Table(*_COLUMNS, box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for index, column in enumerate(table.columns):
        column.no_wrap, column.justify = True, "left" if index < _TEXT_COLUMNS else "right"
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"  # where it is narrow, names give way
    for worker in sorted(snapshot["workers"], key=lambda worker: (worker["role"], worker["name"])):
        table.add_row(*_row(worker))
    return table


def _row(worker: Mapping[str, Any]) -> list[Text]:
    load, ledger = worker["load"], worker["ledger"] or {}
    blocks = [str(ledger.get(state, "-")) for state in ("free", "cached", "leased", "revoked", "total")]
    waiting = load["num_waiting"] + load["num_offers"]
    share = f"{100 * load['num_running'] / worker['max_num_seqs']:.0f}%"
    state = "draining" if worker["draining"] else "serving" if worker["usable"] else "unused"
    cells = [worker["name"], worker["role"], state, str(load["num_running"]), str(waiting), *blocks, share]
    return [Text(cell) for cell in [*cells, f"{worker['heartbeat_age_s']:.1f}s"]]
