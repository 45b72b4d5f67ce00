"""Long runs: the same storm again and again, and what it leaves behind."""

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import Cluster, running, wait_for
from tests.e2e.storm import Storm

ROUNDS = 10
MAX_GROWTH_BYTES = 50 * 2**20


def memory(cluster: Cluster) -> dict[str, int]:
    """Resident bytes of each process of the cluster, by its command line."""
    processes = psutil.Process(cluster.process.pid).children(recursive=True)
    return {f"{process.pid} {' '.join(process.cmdline()[-2:])}": process.memory_info().rss for process in processes}


@pytest.mark.soak
def test_ten_storms_leave_no_block_and_no_memory_behind(tmp_path: Path, cache_dir: Path) -> None:
    """KV memory is taken as it is first used, so what counts is growth after a round that used all of it."""
    options = {"prefill": 1, "decode": 1, "kv_memory": "200M"}
    with running(tmp_path, "smollm2-135m", cache_dir=cache_dir, **options) as up:
        after: list[dict[str, int]] = []
        for number in range(ROUNDS + 1):
            storm = Storm(count=200, at_once=32, cancel_share=1 / 3, seed=number, vocab_size=40000, patience_s=10.0)
            outcome = asyncio.run(storm.blow(up.url))
            assert outcome.failed == []
            assert outcome.completed + outcome.cancelled == 200
            wait_for("every block to come home", up.idle)
            after.append(memory(up))
    growth = {name: after[-1][name] - used for name, used in after[0].items()}
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
