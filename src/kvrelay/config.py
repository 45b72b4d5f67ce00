"""Settings of each process: one frozen class each, filled from the command line and from `KVRELAY_*` variables.

An option exists once, as a field: its description is the help, its default the default, its name the option
(`--kv-memory`) and the variable (`KVRELAY_KV_MEMORY`). The command line wins over the environment.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_settings import BaseSettings, CliDualFlag, NoDecode, SettingsConfigDict

from kvrelay.types import Role

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_PORT = 65535
STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class Metavar:
    """What the help shows for a value whose type alone does not say enough."""

    text: str


def parse_bytes(text: str) -> int:
    """Reads a size such as `2G`, `512MiB` or `1000000`, in powers of 1024.

    Raises:
        ValueError: anything else.
    """
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in ("K", "M", "G", "T") else ""
    try:
        return int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a size; write it like 2G, 512M or 1000000") from error


def _sized(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


def _listed(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _port_range(text: str) -> str:
    ends = text.split("-", 1)
    numeric = all(end.isascii() and end.isdigit() and int(end) <= _MAX_PORT for end in ends)
    if not numeric or int(ends[0]) > int(ends[-1]):
        raise ValueError(f"{text!r} is not a port or a range of ports; write it like 7000 or 7000-7010")
    return text


def _tcp_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        numeric = port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT
        if not (address.startswith("tcp://") and host and numeric):
            raise ValueError(f"{address!r} is not the address of a gateway; write it like tcp://127.0.0.1:5700")
    return addresses


def _http_url(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).hostname:
        raise ValueError(f"{text!r} is not the address of a gateway; write it like http://127.0.0.1:8000")
    return text


Bytes = Annotated[int, Metavar("SIZE"), BeforeValidator(_sized), Field(ge=1)]
Seconds = Annotated[float, Metavar("SECONDS"), Field(gt=0, allow_inf_nan=False)]
Ports = Annotated[str, Metavar("PORT[-PORT]"), AfterValidator(_port_range)]
Addresses = Annotated[
    tuple[str, ...],
    Metavar("ADDRESS,..."),
    NoDecode,
    BeforeValidator(_listed),
    AfterValidator(_tcp_addresses),
    Field(min_length=1),
]
Url = Annotated[str, Metavar("URL"), AfterValidator(_http_url)]
LogFormat = Literal["full", "short"]
Dtype = Literal["auto", "bfloat16", "float32", "float16"]
KVCacheDtype = Literal["auto", "int8"]
Quantization = Literal["auto", "none", "int8", "int4"]
Folder = Annotated[Path, AfterValidator(Path.expanduser)]


class Settings(BaseSettings):
    """What every command shares."""

    model_config = SettingsConfigDict(
        env_prefix="KVRELAY_",
        env_prefix_target="all",
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        validate_by_name=True,
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_avoid_json=True,
    )


class ProcessSettings(Settings):
    """What every process of a cluster shares."""

    model: str = Field("smollm2-135m", description="Hugging Face folder, GGUF file, or the name smollm2-135m.")
    cache_dir: Folder = Field(Path("~/.cache/kvrelay"), description="Fetched models and converted weights.")
    heartbeat_s: Seconds = Field(0.5, description="Seconds between heartbeats.")
    death_s: Seconds = Field(2.0, description="Seconds without a heartbeat after which a peer counts as dead.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged, to stderr.")
    log_format: LogFormat = Field("full", description="short leaves out what infos need not have: date and origin.")

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> Self:
        if self.death_s <= self.heartbeat_s:
            raise ValueError(f"--death-s ({self.death_s}) must be longer than --heartbeat-s ({self.heartbeat_s})")
        return self


class GatewaySettings(ProcessSettings):
    """Serve the OpenAI API over HTTP and hand requests to the workers that register."""

    host: str = Field("127.0.0.1", description="Address to serve HTTP on.")
    port: int = Field(8000, ge=0, le=_MAX_PORT, description="Port to serve HTTP on; 0 takes a free one.")
    listen: str = Field("tcp://127.0.0.1:5700", description="Address at which workers register.")
    max_requests: PositiveInt = Field(512, description="Requests in flight; more are refused with 429.")
    max_body_bytes: Bytes = Field(4 * 2**20, description="Largest request body; larger ones are refused with 413.")
    request_timeout_s: Seconds = Field(600.0, description="Longest life of a request.")
    client_timeout_s: Seconds = Field(60.0, description="A client that reads nothing for so long is cancelled.")
    resend_s: Seconds = Field(5.0, description="Silence after which lost tokens are asked for again.")


class WorkerOptions(ProcessSettings):
    """What the workers of one cluster usually have in common."""

    bind: str = Field("127.0.0.1", description="Address at which other workers reach this one.")
    advertise: str = Field("", description="Address told to others, if it is not --bind (NAT, containers).")
    ports: Ports = Field("0", description="Port to bind, or a range to choose from; 0 takes a free one.")
    transport: Literal["auto", "shm", "ucx", "zmq"] = Field(
        "auto", description="How KV travels; auto takes the best that both workers have, shared memory on one host."
    )
    threads: PositiveInt | None = Field(None, description="Threads for compute; all usable cores if not given.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    dtype: Dtype = Field("auto", description="Precision of the model.")
    kv_cache_dtype: KVCacheDtype = Field(
        "auto", description="Precision of KV; auto: the model's. int8 takes about half of bfloat16's memory, on a CPU."
    )
    quantization: Quantization = Field(
        "none",
        description="How weights are kept; auto keeps those of a quantised file as they are, which is faster.",
    )
    kernels: Literal["auto", "triton", "torch"] = Field(
        "auto", description="What the model computes with; auto: native code on a CPU, Triton on a GPU."
    )
    native_dir: Folder | None = Field(None, description="Where native code is kept, if not in the cache folder.")
    kv_memory: Bytes | None = Field(None, description="Memory for KV, such as 2G; a fair share if not given.")
    block_size: int = Field(16, ge=8, le=64, description="Tokens in a KV block.")
    max_batch_tokens: PositiveInt = Field(512, description="Prompt tokens computed in one step (the chunk size).")
    max_num_seqs: PositiveInt = Field(64, description="Sequences that run at the same time.")
    max_queue: PositiveInt = Field(512, description="Requests that wait at this worker; more are refused.")
    max_model_len: PositiveInt | None = Field(None, description="Context length, if less than the model's.")
    prefix_cache: CliDualFlag[bool] = Field(
        True, description="Reuse KV of prompts and answers that begin alike; on by default."
    )
    lease_s: Seconds = Field(
        120.0, description="Longest life of a KV hand-over, from the prompt's first chunk to its last block."
    )
    keep_outputs_s: Seconds = Field(60.0, description="How long unacknowledged outputs are kept.")


class WorkerSettings(WorkerOptions):
    """Run one worker, which registers at its gateways and serves until it is stopped."""

    role: Role = Field(Role.BOTH, description="What the worker does; both is a colocated worker.")
    name: str = Field("", max_length=200, description="Name in /cluster; the role and process id if not given.")
    gateways: Addresses = Field(("tcp://127.0.0.1:5700",), description="Gateways to register at.")
    core: NonNegativeInt | None = Field(None, description="Pin to this core (modulo those there are).")
    workers_on_machine: PositiveInt = Field(1, description="Workers among which this machine's memory is shared.")


class PrefillSettings(WorkerSettings):
    """Run a prefill worker, which registers at its gateways and serves until it is stopped."""

    role: Literal[Role.PREFILL] = Field(Role.PREFILL, description="What the worker does.")


class DecodeSettings(WorkerSettings):
    """Run a decode worker, or with --role both a colocated one, until it is stopped."""

    role: Literal[Role.DECODE, Role.BOTH] = Field(Role.DECODE, description="What it does; both is a colocated worker.")


class UpSettings(GatewaySettings, WorkerOptions):
    """Start a gateway and workers on this machine and keep them running until Ctrl-C.

    Every worker is pinned to a core of its own, unless --threads is given.
    """

    listen: str = Field("", description="Address at which workers register; a free local port if not given.")
    log_format: LogFormat = Field("short", description="full adds date and origin to what every process logs.")
    prefill: NonNegativeInt = Field(1, description="Number of prefill workers.")
    decode: NonNegativeInt = Field(1, description="Number of decode workers.")
    both: NonNegativeInt = Field(0, description="Number of colocated workers, which do both.")

    @model_validator(mode="after")
    def _can_serve(self) -> Self:
        if not self.both and not (self.prefill and self.decode) and not self.listen:
            raise ValueError(
                "A cluster needs at least one prefill and one decode worker (--prefill 1 --decode 1) or a colocated "
                "one (--both 1); give --listen if others join from elsewhere"
            )
        return self


class ClientSettings(Settings):
    """What the commands share that talk to a running gateway."""

    url: Url = Field("http://127.0.0.1:8000", description="Where the gateway serves HTTP.")


class StatusSettings(ClientSettings):
    """Show the pools of a running cluster and where its bottleneck is."""

    json_file: Path | None = Field(
        None, alias="json", description="Also write the figures to this file; - for stdout, alone."
    )
    watch: bool = Field(False, description="Refresh every second until Ctrl-C.")

    @model_validator(mode="after")
    def _one_use_of_stdout(self) -> Self:
        if self.watch and self.json_file == STDOUT:
            raise ValueError("--json - writes the figures once; leave out --watch, or give --json a file")
        return self


class ChatSettings(ClientSettings):
    """Chat in the terminal: /reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer."""

    model: str = Field("", description="Model to ask for; the one that is served if not given.")
    system: str = Field("", description="System message.")
    max_tokens: PositiveInt = Field(512, description="Longest answer, in tokens.")
    temperature: float = Field(0.2, ge=0, le=2, allow_inf_nan=False, description="0 takes the likeliest token.")
    seed: int | None = Field(None, ge=0, lt=2**64, description="Makes answers repeatable.")


class VerifySettings(ClientSettings):
    """Ask two gateways, or clusters started here, the same questions, and compare every bit of the answers.

    Exits with 0 if token ids and logprobs are the same everywhere, and with 1 if not. --url is compared with --against;
    with --local clusters of different forms are started one after the other and compared with a plain one.
    """

    against: Url | None = Field(None, description="Gateway whose answers must be those of --url.")
    local: bool = Field(False, description="Start clusters on this machine instead of asking running gateways.")
    arms: Annotated[tuple[str, ...], Metavar("NAME,..."), NoDecode, BeforeValidator(_listed)] = Field(
        (), description="Which clusters --local compares with the plain one; all if not given."
    )
    requests: PositiveInt = Field(100, description="Requests to each gateway or cluster.")
    concurrency: PositiveInt = Field(33, description="Most requests at a time.")
    max_model_len: PositiveInt = Field(640, ge=2, description="Longest request: tokens of prompt and answer.")
    seed: NonNegativeInt = Field(0, description="Of the requests.")
    json_file: Path | None = Field(
        None, alias="json", description="Also write the figures to this file; - for stdout, alone."
    )
    model: str = Field("smollm2-135m", description="With --local: folder, GGUF file or name of the model.")
    dtype: Dtype = Field("auto", description="With --local: precision of the model.")
    kv_cache_dtype: KVCacheDtype = Field("auto", description="With --local: precision of KV.")
    quantization: Quantization = Field("none", description="With --local: how the CPU keeps weights.")
    cache_dir: Folder = Field(Path("~/.cache/kvrelay"), description="With --local: fetched models and weights.")

    @model_validator(mode="after")
    def _compares_something(self) -> Self:
        if self.local == (self.against is not None):
            raise ValueError("Give either --against, a second gateway to compare --url with, or --local")
        if self.arms and not self.local:
            raise ValueError("--arms names clusters that --local starts; give --local too, or leave it out")
        return self


def variables(settings: Settings) -> dict[str, str]:
    """The settings as `KVRELAY_*` variables: what a child process needs to have the same ones."""
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    return {f"KVRELAY_{name.upper()}": _text(value) for name, value in values.items() if value is not None}


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value.value if isinstance(value, Enum) else value)
