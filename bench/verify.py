"""`kvrelay verify`: the same questions to different clusters, whose answers must be the same in every bit."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from kvrelay.bench.report import commit
from kvrelay.bench.verify_arms import ARMS, PLAIN
from kvrelay.bench.verify_client import ask, snapshot_of
from kvrelay.bench.verify_cluster import running
from kvrelay.bench.verify_compare import Answer, Arm, Comparison
from kvrelay.bench.verify_plan import Limits, Question, Wave, make_plan
from kvrelay.client import GatewayError
from kvrelay.config import STDOUT, VerifySettings
from kvrelay.errors import StartError
from kvrelay.options import did_you_mean
from kvrelay.types import KVLayout

_PIPED_WIDTH = 200


def run(settings: VerifySettings) -> int:
    """Compares, and shows a table. Gives 0 if everything is the same, 1 if not.

    Raises:
        StartError: a gateway does not answer or cannot serve, a cluster does not start, or a file cannot be written.
    """
    comparison = Comparison()
    if settings.json_file not in (None, STDOUT):
        _save(settings, comparison)  # before anything takes time, so that a file that cannot be written is told at once
    with _progress() as (console, progress):
        verification = _Verification(settings, comparison, console, progress)
        if settings.local:
            _compare_clusters(settings, verification)
        else:
            _compare_gateways(settings, verification)
    _save(settings, comparison)
    if settings.json_file != STDOUT:
        console = Console()
        (console if console.is_terminal else Console(width=_PIPED_WIDTH)).print(table(comparison))
    return 1 if comparison.mismatches else 0


def _compare_gateways(settings: VerifySettings, verification: "_Verification") -> None:
    urls = (settings.url, settings.against or settings.url)
    snapshots = [_ready_snapshot(url) for url in urls]
    if len({snapshot["fingerprint"] for snapshot in snapshots}) > 1:
        models = " and ".join(str(snapshot["model"]) for snapshot in snapshots)
        raise StartError(
            f"The gateways serve different models, {models}: nothing can be the same; name two of one model."
        )
    plan = _plan(settings, snapshots)
    for url in urls:
        verification.measure(url, url, plan)


def _compare_clusters(settings: VerifySettings, verification: "_Verification") -> None:
    for name in settings.arms:
        if name not in ARMS:
            raise StartError(f"There is no arm {name!r}{did_you_mean(name, ARMS)}; there are {', '.join(ARMS)}.")
    plan: tuple[Wave, ...] = ()
    layout: KVLayout | None = None
    for name in (PLAIN, *(settings.arms or [name for name in ARMS if name != PLAIN])):
        verification.say(f"{name}: starting")
        with running(ARMS[name], settings, layout) as url:
            if layout is None:
                snapshot = _ready_snapshot(url)
                plan, layout = _plan(settings, [snapshot]), KVLayout(**snapshot["workers"][0]["layout"])
            verification.measure(name, url, plan)


def _ready_snapshot(url: str) -> dict[str, Any]:
    try:
        snapshot = snapshot_of(url)
    except GatewayError as error:
        raise StartError(str(error)) from error
    if not snapshot["ready"]:
        raise StartError(f"The gateway at {url} cannot serve: {snapshot['reason']}")
    return snapshot


def _plan(settings: VerifySettings, snapshots: list[dict[str, Any]]) -> tuple[Wave, ...]:
    vocab_size = min(worker["vocab_size"] for snapshot in snapshots for worker in snapshot["workers"])
    longest = min(settings.max_model_len, *(snapshot["max_model_len"] for snapshot in snapshots))
    return make_plan(settings.seed, settings.requests, settings.concurrency, Limits(vocab_size, longest))


class _Verification:
    """Asks one endpoint after the other, and shows how far it is."""

    def __init__(self, settings: VerifySettings, comparison: Comparison, console: Console, progress: Progress) -> None:
        self._settings = settings
        self._comparison = comparison
        self._console = console
        self._progress = progress

    def say(self, text: str) -> None:
        """A line on stderr."""
        self._console.print(Text(text))

    def measure(self, name: str, url: str, plan: tuple[Wave, ...]) -> None:
        """Sends all waves to one endpoint."""
        arm = self._comparison.begin(name)
        task = self._progress.add_task(name, total=self._settings.requests)
        begin, before = time.monotonic(), _preempted(url)

        def take(question: Question, answer: Answer) -> None:
            self._comparison.add(question, answer)
            self._progress.advance(task)

        ask(url, plan, take)
        arm.preempted = _preempted(url) - before
        self._progress.remove_task(task)
        self.say(f"{_sentence(arm)} ({time.monotonic() - begin:.0f} s)")


def _preempted(url: str) -> int:
    """Sequences that were preempted so far at any worker; 0 where that is not told."""
    try:
        return sum(worker["counters"].get("preempted", 0) for worker in snapshot_of(url)["workers"])
    except GatewayError:  # its requests have failed then, which is told
        return 0


def _sentence(arm: Arm) -> str:
    first = f"; first at {arm.first}" if arm.first else ""
    return f"{arm.name}: {arm.requests} requests, {arm.mismatches} mismatches{first}"


@contextmanager
def _progress() -> Iterator[tuple[Console, Progress]]:
    console = Console(stderr=True, soft_wrap=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield console, progress


def table(comparison: Comparison) -> Table:
    """A line for each arm."""
    shown = Table(
        "arm", "requests", "compared", "mismatches", "cached\ntokens", "preempted", "first difference", box=None
    )
    for column in shown.columns[1:6]:
        column.justify = "right"
    for arm in comparison.arms:
        numbers = (arm.requests, arm.compared, arm.mismatches, arm.cached_tokens, arm.preempted)
        shown.add_row(arm.name, *map(str, numbers), Text(str(arm.first or "")))
    return shown


def _save(settings: VerifySettings, comparison: Comparison) -> None:
    if settings.json_file is None:
        return
    record = {
        "commit": commit(),
        "seed": settings.seed,
        "settings": settings.model_dump(mode="json"),
        "requests": comparison.requests,
        "mismatches": comparison.mismatches,
        "arms": [arm.record for arm in comparison.arms],
    }
    text = json.dumps(record, indent=2) + os.linesep
    if settings.json_file == STDOUT:
        sys.stdout.write(text)
        return
    try:
        settings.json_file.write_text(text)
    except OSError as error:
        raise StartError(
            f"{settings.json_file} cannot be written: {error.strerror}; give --json another file."
        ) from error
