"""The clusters that `kvrelay verify --local` starts: one plain, the others different in one way each. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrelay.children import ChildSpec
from kvrelay.config import GatewaySettings, VerifySettings, WorkerSettings
from kvrelay.types import KVLayout, Role
from kvrelay.up import command_spec

PLAIN = "whole"


@dataclass(frozen=True, slots=True)
class LocalArm:
    """Workers by role, and what is different about them: all, prefill workers, or those that decode."""

    prefill: int = 1
    decode: int = 1
    both: int = 0
    all: Mapping[str, Any] = field(default_factory=dict)
    prefilling: Mapping[str, Any] = field(default_factory=dict)
    decoding: Mapping[str, Any] = field(default_factory=dict)
    few_blocks: bool = False  # where it decodes: those of one long sequence, so that others are preempted

    @property
    def workers(self) -> list[tuple[str, Role]]:
        """Name and role of each."""
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}
        return [(f"{role}-{index}", role) for role, count in counts.items() for index in range(count)]


ARMS: Mapping[str, LocalArm] = {
    PLAIN: LocalArm(),
    "chunk-64": LocalArm(all={"max_batch_tokens": 64}),
    "chunk-256": LocalArm(all={"max_batch_tokens": 256}),
    "blocks-8-32": LocalArm(prefilling={"block_size": 8}, decoding={"block_size": 32}),
    "blocks-32-8": LocalArm(prefilling={"block_size": 32}, decoding={"block_size": 8}),
    "2P2D": LocalArm(prefill=2, decode=2),
    "no-cache": LocalArm(all={"prefix_cache": False}),
    "few-blocks": LocalArm(few_blocks=True),
    "both": LocalArm(prefill=0, decode=0, both=1),
    "both-chunk-64": LocalArm(prefill=0, decode=0, both=1, all={"max_batch_tokens": 64}),
    "both-few-blocks": LocalArm(prefill=0, decode=0, both=1, few_blocks=True),
}


@dataclass(frozen=True, slots=True)
class Addresses:
    """Free ports of this machine: for clients and for workers."""

    http: int
    workers: int

    @property
    def url(self) -> str:
        """Where clients reach the gateway."""
        return f"http://127.0.0.1:{self.http}"

    @property
    def at(self) -> str:
        """Where workers reach the gateway."""
        return f"tcp://127.0.0.1:{self.workers}"


def child_specs(
    arm: LocalArm, settings: VerifySettings, addresses: Addresses, layout: KVLayout | None, environ: Mapping[str, str]
) -> list[ChildSpec]:
    """The gateway and the workers of an arm, each worker on a core of its own as `kvrelay up` has it.

    `layout` is that of a worker of the plain arm. Options that no arm is about are those of the environment.

    Raises:
        ValueError: an arm with few blocks and no layout, which tells how large they are.
    """
    shared: dict[str, Any] = {"model": settings.model, "cache_dir": settings.cache_dir, "heartbeat_s": 0.1}
    gateway = GatewaySettings(**shared, host="127.0.0.1", port=addresses.http, listen=addresses.at)
    specs = [command_spec("gateway", "gateway", gateway, environ)]
    for index, (name, role) in enumerate(arm.workers):
        worker = WorkerSettings(
            **shared,
            **_options(arm, role, settings, layout),
            dtype=settings.dtype,
            kv_cache_dtype=settings.kv_cache_dtype,
            quantization=settings.quantization,
            role=role,
            name=name,
            gateways=(addresses.at,),
            core=index,
            workers_on_machine=len(arm.workers),
        )
        specs.append(command_spec(name, "prefill" if role is Role.PREFILL else "decode", worker, environ))
    return specs


def _options(arm: LocalArm, role: Role, settings: VerifySettings, layout: KVLayout | None) -> dict[str, Any]:
    longest = settings.max_model_len
    plain = {"max_model_len": longest, "max_batch_tokens": longest, "block_size": 16, "prefix_cache": True}
    own = arm.prefilling if role is Role.PREFILL else arm.decoding
    if arm.few_blocks and role is not Role.PREFILL:
        own = {**own, "kv_memory": _few_bytes(longest, layout)}
    return {**plain, **arm.all, **own}


def _few_bytes(max_model_len: int, layout: KVLayout | None) -> int:
    if layout is None:
        raise ValueError(
            "How large a KV block is must be known before an arm with few of them; run the plain arm first."
        )
    return layout.num_blocks(max_model_len) * layout.block_bytes * layout.num_layers
