"""Settings of each process: one frozen class each, filled from the command line and from `KVRELAY_*` variables."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvrelay.types import Role

Bytes = Annotated[int, Field(ge=1)]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Settings(BaseSettings):
    """What every process shares. An option on the command line wins over its environment variable."""

    model_config = SettingsConfigDict(env_prefix="KVRELAY_", frozen=True, extra="forbid", env_ignore_empty=True)

    model: str = Field("smollm2-135m", description="Hugging Face folder, GGUF file, or the name smollm2-135m.")
    cache_dir: Path = Field(Path.home() / ".cache" / "kvrelay", description="Fetched models and converted weights.")
    heartbeat_s: PositiveFloat = Field(0.5, description="Seconds between heartbeats.")
    death_s: PositiveFloat = Field(2.0, description="Seconds without a heartbeat after which a peer counts as dead.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged, to stderr.")


class GatewaySettings(Settings):
    """The gateway: HTTP towards clients, ZeroMQ towards workers."""

    host: str = Field("127.0.0.1", description="Address to serve HTTP on.")
    port: int = Field(8000, ge=0, lt=65536, description="Port to serve HTTP on; 0 takes a free one.")
    listen: str = Field("tcp://127.0.0.1:5700", description="Address at which workers register.")
    max_requests: PositiveInt = Field(512, description="Requests in flight; more are refused with 429.")
    max_body_bytes: Bytes = Field(4 * 2**20, description="Largest request body; larger ones are refused with 413.")
    request_timeout_s: PositiveFloat = Field(600.0, description="Longest life of a request.")
    client_timeout_s: PositiveFloat = Field(60.0, description="A client that reads nothing for so long is cancelled.")
    resend_s: PositiveFloat = Field(5.0, description="Silence after which lost tokens are asked for again.")


class WorkerSettings(Settings):
    """A prefill, decode or colocated worker."""

    role: Role = Field(Role.BOTH, description="prefill, decode or both.")
    name: str = Field("", max_length=200, description="Name in /cluster; the role and process id if empty.")
    gateways: Annotated[tuple[str, ...], NoDecode] = Field(
        ("tcp://127.0.0.1:5700",), min_length=1, description="Gateways to register at, separated by commas."
    )
    bind: str = Field("127.0.0.1", description="Address at which other workers reach this one.")
    advertise: str = Field("", description="Address told to others, if it is not --bind (NAT, containers).")
    ports: str = Field("0", pattern=r"^\d{1,5}(-\d{1,5})?$", description="0, a port, or a range such as 7000-7010.")
    core: int | None = Field(None, ge=0, description="Pin to this core (modulo those there are).")
    threads: PositiveInt | None = Field(None, description="Threads for compute; all usable cores if not given.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = Field("auto", description="Precision of the model.")
    kv_memory: Bytes | None = Field(None, description="Memory for KV, such as 2G; a fair share if not given.")
    block_size: int = Field(16, ge=8, le=64, description="Tokens in a KV block.")
    max_batch_tokens: PositiveInt = Field(512, description="Prompt tokens computed in one step (the chunk size).")
    max_num_seqs: PositiveInt = Field(64, description="Sequences that run at the same time.")
    max_queue: PositiveInt = Field(512, description="Requests that wait at this worker; more are refused.")
    max_model_len: PositiveInt | None = Field(None, description="Context length, if less than the model's.")
    lease_s: PositiveFloat = Field(30.0, description="Longest life of a KV hand-over.")
    keep_outputs_s: PositiveFloat = Field(60.0, description="How long unacknowledged outputs are kept.")

    @field_validator("gateways", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _parse_bytes(cls, value: object) -> object:
        return parse_bytes(value) if isinstance(value, str) else value


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
        raise ValueError(f"{text!r} is not a size; write it like 2G, 512M or 1000000.") from error
