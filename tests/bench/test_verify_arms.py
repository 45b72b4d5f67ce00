"""The clusters of `kvrelay verify --local`: what each is told, as its children's environment."""

from typing import Any

import pytest

from kvrelay.bench.verify_arms import ARMS, PLAIN, Addresses, child_specs
from kvrelay.config import VerifySettings
from kvrelay.types import KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
ADDRESSES = Addresses(http=1234, workers=1235)


def told(arm: str, **options: Any) -> dict[str, dict[str, str]]:
    """What each process of an arm is told, by name, but its `KVRELAY_`."""
    settings = VerifySettings(
        local=True, model="m", dtype="float32", quantization="none", kv_cache_dtype="int8", **options
    )
    environ = {"PATH": "/bin", "KVRELAY_ARMS": "x"}
    specs = child_specs(ARMS[arm], settings, ADDRESSES, LAYOUT, environ)
    assert all(spec.environ["PATH"] == "/bin" and "KVRELAY_ARMS" not in spec.environ for spec in specs)
    return {spec.name: {name.removeprefix("KVRELAY_"): value for name, value in spec.environ.items()} for spec in specs}


def test_the_plain_one_computes_prompts_whole() -> None:
    processes = told(PLAIN, max_model_len=500)
    assert list(processes) == ["gateway", "prefill-0", "decode-0"]
    assert processes["gateway"]["PORT"] == "1234"
    for name, role, core in (("prefill-0", "prefill", "0"), ("decode-0", "decode", "1")):
        worker = processes[name]
        assert (worker["ROLE"], worker["CORE"], worker["WORKERS_ON_MACHINE"]) == (role, core, "2")
        assert worker["GATEWAYS"] == processes["gateway"]["LISTEN"] == "tcp://127.0.0.1:1235"
        assert worker["MAX_BATCH_TOKENS"] == worker["MAX_MODEL_LEN"] == "500"
        assert (worker["MODEL"], worker["PREFIX_CACHE"]) == ("m", "True")
        assert (worker["DTYPE"], worker["QUANTIZATION"], worker["KV_CACHE_DTYPE"]) == ("float32", "none", "int8")


@pytest.mark.parametrize("arm", [name for name in ARMS if name != PLAIN])
def test_every_other_one_differs(arm: str) -> None:
    ignored = ("CORE", "WORKERS_ON_MACHINE", "NAME")
    plain, other = (
        {name: {key: value for key, value in process.items() if key not in ignored} for name, process in each.items()}
        for each in (told(PLAIN), told(arm))
    )
    assert other != plain


def test_blocks_of_different_sizes() -> None:
    processes = told("blocks-8-32")
    assert (processes["prefill-0"]["BLOCK_SIZE"], processes["decode-0"]["BLOCK_SIZE"]) == ("8", "32")


@pytest.mark.parametrize(("arm", "decoder"), [("few-blocks", "decode-0"), ("both-few-blocks", "both-0")])
def test_few_blocks_hold_one_sequence_of_full_length(arm: str, decoder: str) -> None:
    processes = told(arm, max_model_len=100)
    memory = int(processes[decoder]["KV_MEMORY"])
    assert memory // (LAYOUT.block_bytes * LAYOUT.num_layers) == 7
    assert "KV_MEMORY" not in processes.get("prefill-0", {})
    with pytest.raises(ValueError, match="plain arm first"):
        child_specs(ARMS[arm], VerifySettings(local=True), ADDRESSES, None, {})
