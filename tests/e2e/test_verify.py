"""`kvrelay verify` on real clusters: with native kernels, nothing that differs between them changes a bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import running
from tests.places import CACHE_DIR
from tests.tiny_model import write_tiny_model


def verify(folder: Path, *options: str, timeout_s: float = 240) -> tuple[int, dict[str, Any]]:
    """Its exit code and what it wrote."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVRELAY_")}
    environ["KVRELAY_NATIVE_DIR"] = str(CACHE_DIR)
    record = folder / "verify.json"
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay", "verify", f"--json={record}", *options],
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    content: dict[str, Any] = json.loads(record.read_text())
    return done.returncode, content


def test_one_cluster_is_like_itself_one_request_at_a_time(tmp_path: Path) -> None:
    """Nothing runs beside a request, and nothing is cached: also kernels that mind either give the same bits."""
    model = write_tiny_model(tmp_path / "tiny")
    options: dict[str, Any] = {
        "dtype": "float32",
        "kv_memory": "16M",
        "cache_dir": tmp_path / "cache",
        "native_dir": CACHE_DIR,
    }
    with running(tmp_path, model, prefix_cache=False, **options) as up:
        code, record = verify(tmp_path, f"--url={up.url}", f"--against={up.url}", "--requests=15", "--concurrency=1")
    assert (code, record["requests"], record["mismatches"]) == (0, 30, 0)
    assert all(arm["compared"] > 0 for arm in record["arms"])


@pytest.mark.timeout(300)
def test_clusters_started_here_are_the_same_and_what_they_are_named_for(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    options = ["--dtype=float32", f"--model={model}", f"--cache-dir={tmp_path / 'cache'}", "--requests=70"]
    code, record = verify(tmp_path, "--local", "--arms=no-cache,both-few-blocks", "--max-model-len=160", *options)
    assert (code, record["requests"], record["mismatches"]) == (0, 210, 0)
    whole, no_cache, few = record["arms"]
    assert [arm["name"] for arm in record["arms"]] == ["whole", "no-cache", "both-few-blocks"]
    assert whole["cached_tokens"] > 0
    assert no_cache["cached_tokens"] == 0
    assert few["preempted"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_cache_dtype"),
    [
        ("auto", "auto", "auto"),
        ("bfloat16", "none", "auto"),
        ("bfloat16", "int8", "auto"),
        ("bfloat16", "int4", "auto"),
        ("float32", "none", "auto"),
        ("bfloat16", "none", "int8"),
    ],
)
def test_the_bundled_model_is_the_same_everywhere_in_every_precision(
    tmp_path: Path, cache_dir: Path, dtype: str, quantization: str, kv_cache_dtype: str
) -> None:
    """A thousand requests in each, to clusters of every form."""
    precision = [f"--dtype={dtype}", f"--quantization={quantization}", f"--kv-cache-dtype={kv_cache_dtype}"]
    options = ["--local", "--requests=91", f"--cache-dir={cache_dir}", *precision]
    code, record = verify(tmp_path, *options, timeout_s=1700)
    assert (code, record["requests"], record["mismatches"]) == (0, 91 * len(record["arms"]), 0)
    assert record["requests"] >= 1000
    assert any(arm["preempted"] for arm in record["arms"])
