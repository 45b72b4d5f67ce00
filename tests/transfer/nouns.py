"""Small things that the tests of the hand-over are made of."""

import hashlib
from collections.abc import Iterable
from typing import TypeVar

from kvrelay.blocks import BlockManager
from kvrelay.messages import Message, Peer
from kvrelay.prefixes import Prefixes
from kvrelay.transfer.protocol.actions import Action, Send, SendPiece
from kvrelay.transfer.protocol.receiver import KVReceiver
from kvrelay.transfer.protocol.sender import KVSender
from kvrelay.types import KVLayout, RequestKey, SamplingParams, Sequence

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=2, dtype="float16")  # 16 bytes a block
FINGERPRINT = "tiny"
LEASE_S = 10.0
MARGIN_S = 1.0
RESEND_S = 0.5
GATEWAY = 77
NUM_BLOCKS = 20

A = TypeVar("A", bound=Action)
M = TypeVar("M", bound=Message)


def new_sender(incarnation: int, *, max_piece_bytes: int = 2**20) -> KVSender:
    """A sender with the tests' settings."""
    return KVSender(
        incarnation=incarnation,
        layout=LAYOUT,
        fingerprint=FINGERPRINT,
        lease_s=LEASE_S,
        margin_s=MARGIN_S,
        resend_s=RESEND_S,
        max_piece_bytes=max_piece_bytes,
    )


def new_receiver(
    incarnation: int,
    blocks: BlockManager,
    *,
    max_queue: int = 4,
    max_model_len: int = 30,
    prefixes: Prefixes | None = None,
) -> KVReceiver:
    """A receiver with the tests' settings."""
    return KVReceiver(
        incarnation=incarnation,
        layout=LAYOUT,
        fingerprint=FINGERPRINT,
        blocks=blocks,
        max_model_len=max_model_len,
        max_queue=max_queue,
        max_lease_s=LEASE_S,
        prefixes=prefixes,
    )


def new_peer(incarnation: int, name: str = "d0") -> Peer:
    """Where a receiver is said to be."""
    return Peer(
        name=name,
        incarnation=incarnation,
        control_endpoint=f"tcp://{name}:1",
        data_endpoints={"zmq": f"tcp://{name}:2"},
    )


def new_sequence(
    key: RequestKey, num_prompt_tokens: int, block_table: Iterable[int] = (), gateway: int = GATEWAY
) -> Sequence:
    """A sequence whose prompt is all its own, unless its name is like "shared.7" or "salted.7".

    Those all begin alike, but have one salt or the other.
    """
    start = int.from_bytes(hashlib.blake2b(_story(key).encode(), digest_size=3).digest(), "little")
    return Sequence(
        key=key,
        sample=0,
        gateway=gateway,
        params=SamplingParams(max_tokens=8),
        token_ids=[start + i for i in range(num_prompt_tokens)],
        num_prompt_tokens=num_prompt_tokens,
        block_table=list(block_table),
        cache_salt=_salt(key),
    )


def _story(key: RequestKey) -> str:
    return "the same" if "." in key.request_id else key.request_id


def _salt(key: RequestKey) -> str:
    return "salt" if key.request_id.startswith("salted.") else ""


def true_kv(key: RequestKey, layer: int, block: int, num_prompt_tokens: int) -> bytes:
    """What a block holds in this layer: if it is full, the same for all that begin alike, else this attempt's own."""
    full = (block + 1) * LAYOUT.block_size <= num_prompt_tokens
    whose = f"{_story(key)}/{_salt(key)}" if full else f"{key.request_id}/{key.attempt}"
    name = f"{whose}/{layer}/{block}".encode()
    return hashlib.blake2b(name, digest_size=LAYOUT.block_bytes).digest()


def only(actions: list[Action], kind: type[A]) -> A:
    """The single action there is."""
    assert len(actions) == 1, actions
    assert isinstance(actions[0], kind), actions
    return actions[0]


def messages(actions: Iterable[Action], kind: type[M]) -> list[M]:
    """Messages of one kind among the actions."""
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def of(actions: Iterable[Action], kind: type[A]) -> list[A]:
    """Actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


def pieces(actions: Iterable[Action]) -> list[SendPiece]:
    """The pieces to send."""
    return of(actions, SendPiece)
