"""Settings: where values come from, what is refused, and that children get exactly what their parent has."""

from pathlib import Path

import pytest

from kvrelay.config import (
    ChatSettings,
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    Settings,
    StatusSettings,
    UpSettings,
    VerifySettings,
    WorkerSettings,
    parse_bytes,
    variables,
)
from kvrelay.errors import StartError
from kvrelay.options import help_text, option, options, parse, refuse_unknown_variables, variable
from kvrelay.types import Role

ALL = (UpSettings, GatewaySettings, PrefillSettings, DecodeSettings, StatusSettings, ChatSettings, VerifySettings)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ALL:
        for name in options(each):
            monkeypatch.delenv(variable(name), raising=False)


def refusal(settings_type: type[Settings], *args: str) -> str:
    """The sentence with which a command line is refused."""
    with pytest.raises(StartError) as refused:
        parse(settings_type, "kvrelay x", args)
    return str(refused.value)


def test_the_command_line_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(GatewaySettings, "kvrelay gateway", []).port == 8000
    monkeypatch.setenv("KVRELAY_PORT", "9000")
    assert parse(GatewaySettings, "kvrelay gateway", []).port == 9000
    assert parse(GatewaySettings, "kvrelay gateway", ["--port", "9001"]).port == 9001


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_PORT", "")
    assert parse(GatewaySettings, "kvrelay gateway", []).port == 8000


def test_each_command_has_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(PrefillSettings, "kvrelay prefill", []).role is Role.PREFILL
    assert parse(DecodeSettings, "kvrelay decode", []).role is Role.DECODE
    assert parse(DecodeSettings, "kvrelay decode", ["--role", "both"]).role is Role.BOTH
    monkeypatch.setenv("KVRELAY_ROLE", "both")
    assert parse(DecodeSettings, "kvrelay decode", []).role is Role.BOTH


def test_values_in_the_spellings_that_people_use() -> None:
    settings = parse(
        DecodeSettings,
        "kvrelay decode",
        ["--gateways", "tcp://a:1, tcp://b:2", "--kv-memory=1.5G", "--ports", "7000-7010", "--cache-dir", "~/x"],
    )
    assert settings.gateways == ("tcp://a:1", "tcp://b:2")
    assert settings.kv_memory == 3 * 2**29
    assert settings.ports == "7000-7010"
    assert settings.cache_dir == Path.home() / "x"
    assert parse(StatusSettings, "kvrelay status", ["--watch", "--json", "f.json"]).json_file == Path("f.json")


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("2K", 2048), ("2kib", 2048), ("3 MB", 3 * 2**20), ("1T", 2**40)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "two", "1X", "nan", "inf", "1e999"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("settings_type", "args", "words"),
    [
        (GatewaySettings, ("--port", "http"), ("--port should be a whole number such as 8000, not 'http'.",)),
        (GatewaySettings, ("--death-s", "2s"), ("--death-s should be a number such as 2.0, not '2s'.",)),
        (PrefillSettings, ("--core", "x"), ("--core should be a whole number such as 4, not 'x'.",)),
        (StatusSettings, ("--watch", "--json", "-"), ("--json -", "--watch")),
        (GatewaySettings, ("--port=65536",), ("--port", "65535")),
        (GatewaySettings, ("--prot", "1"), ("--prot", "did you mean --port?")),
        (GatewaySettings, ("--por", "1"), ("--por", "did you mean --port?")),  # no silent abbreviations
        (GatewaySettings, ("--port",), ("--port", "expects one argument")),
        (GatewaySettings, ("serve",), ("Unexpected argument 'serve'",)),
        (GatewaySettings, ("--max-body-bytes", "many"), ("--max-body-bytes", "not a size")),
        (GatewaySettings, ("--max-body-bytes", "0"), ("--max-body-bytes", "greater than or equal to 1")),
        (GatewaySettings, ("--death-s", "inf"), ("--death-s", "finite")),
        (GatewaySettings, ("--death-s", "nan"), ("--death-s", "finite")),
        (GatewaySettings, ("--heartbeat-s", "3"), ("--death-s (2.0) must be longer than --heartbeat-s (3.0)",)),
        (PrefillSettings, ("--role", "both"), ("--role should be 'prefill', not 'both'",)),
        (PrefillSettings, ("--dtype", "int4"), ("--dtype", "'bfloat16'", "'int4'")),
        (PrefillSettings, ("--ports", "9-8"), ("--ports", "7000-7010")),
        (PrefillSettings, ("--ports", "70000"), ("--ports", "7000-7010")),
        (PrefillSettings, ("--ports", "²"), ("--ports", "7000-7010")),
        (PrefillSettings, ("--gateways", ","), ("--gateways", "at least 1")),
        (PrefillSettings, ("--gateways", "tcp://a:1,http://b:2"), ("--gateways", "'http://b:2'", "tcp://")),
        (PrefillSettings, ("--gateways", "tcp://a:65536"), ("--gateways", "'tcp://a:65536'")),
        (PrefillSettings, ("--gateways", "tcp://a"), ("--gateways", "'tcp://a'")),
        (PrefillSettings, ("--core", "-1"), ("--core", "0")),
        (UpSettings, ("--prefill", "0"), ("at least one prefill and one decode worker",)),
        (StatusSettings, ("--url", "localhost:8000"), ("--url", "http://127.0.0.1:8000")),
        (ChatSettings, ("--temperature", "nan"), ("--temperature", "not 'nan'")),
    ],
)
def test_what_is_refused_names_the_option_and_what_is_expected(
    settings_type: type[Settings], args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    sentence = refusal(settings_type, *args)
    assert all(word in sentence for word in words), sentence
    assert sentence.endswith("See `kvrelay x --help`.")
    assert "\n" not in sentence


def test_a_malformed_variable_is_named_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_PORT", "tcp://10.0.0.1:80")
    expected = "KVRELAY_PORT should be a whole number such as 8000, not 'tcp://10.0.0.1:80'."
    assert refusal(GatewaySettings).startswith(expected)


def test_a_variable_that_is_no_option_is_refused() -> None:
    refuse_unknown_variables(ALL, {"KVRELAY_PORT": "1", "kvrelay_dtype": "float32", "PATH": "/"})
    with pytest.raises(StartError, match=r"KVRELAY_DTPYE .*did you mean KVRELAY_DTYPE\?"):
        refuse_unknown_variables(ALL, {"KVRELAY_DTPYE": "float32"})


def test_one_colocated_worker_is_a_cluster() -> None:
    assert parse(UpSettings, "kvrelay up", ["--prefill", "0", "--decode", "0", "--both", "1"]).both == 1


def test_a_part_of_a_cluster_may_be_started_where_others_can_join() -> None:
    assert parse(UpSettings, "kvrelay up", ["--decode", "0", "--listen", "tcp://10.0.0.1:5700"]).decode == 0


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValueError, match="frozen"):
        GatewaySettings().port = 1  # type: ignore[misc]


@pytest.mark.parametrize("settings_type", ALL)
def test_help_lists_every_option_with_its_description(settings_type: type[Settings]) -> None:
    text = help_text(settings_type, "kvrelay x")
    for name, field in options(settings_type).items():
        assert f"  {option(name)}" in text
        assert field.description
        assert field.description.split()[0] in text


def test_help_shows_choices_and_defaults() -> None:
    text = help_text(DecodeSettings, "kvrelay decode")
    assert "--role decode|both" in text
    assert "--kv-memory SIZE" in text
    assert "[tcp://127.0.0.1:5700]" in text
    assert "--prefix-cache, --no-prefix-cache  " in text


def test_the_prefix_cache_is_on_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(PrefillSettings, "kvrelay prefill", []).prefix_cache
    assert not parse(PrefillSettings, "kvrelay prefill", ["--no-prefix-cache"]).prefix_cache
    monkeypatch.setenv("KVRELAY_PREFIX_CACHE", "off")
    assert not parse(UpSettings, "kvrelay up", []).prefix_cache
    assert parse(UpSettings, "kvrelay up", ["--prefix-cache"]).prefix_cache


def test_children_get_exactly_what_their_parent_has(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(
        role=Role.DECODE,
        name="d",
        gateways=("tcp://a:1", "tcp://b:2"),
        kv_memory=12345,
        core=1,
        lease_s=0.1,
        prefix_cache=False,
    )
    for name, value in variables(settings).items():
        monkeypatch.setenv(name, value)
    assert WorkerSettings() == settings
    assert parse(DecodeSettings, "kvrelay decode", []).model_dump() == settings.model_dump()
