"""How benchmarks show figures: a table for people, JSON with seed, settings and commit for everything else."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MAX_WIDTH = 500  # of a table, in characters; that of a terminal, or 80 where there is none, would cut figures off


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows that share their keys as a table."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=MAX_WIDTH).print(table)


def write_json(path: Path, rows: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Writes the rows and everything needed to repeat them."""
    record = {"commit": commit(), "machine": platform.processor() or platform.machine(), "settings": settings}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**record, "rows": rows}, indent=2) + "\n")


def commit() -> str:
    """The commit of this checkout, with a mark if something is changed; unknown outside of one."""
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).resolve().parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"
