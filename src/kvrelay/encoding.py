"""Messages as frames: JSON behind a digest of it, since a flipped bit may well leave JSON that says something else."""

import hashlib

from pydantic import TypeAdapter, ValidationError

from kvrelay.errors import WireError
from kvrelay.messages import AnyMessage, Message

DIGEST_BYTES = 16  # hexadecimal digits
MAX_LISTED_ERRORS = 100
MAX_QUOTED = 200  # letters of what a peer sent that are repeated in a log
_ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)


def encode(message: Message) -> bytes:
    """Message to one frame."""
    return seal(message.model_dump_json().encode())


def seal(text: bytes) -> bytes:
    """The frame of a message that is JSON already."""
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES // 2).hexdigest().encode() + text


def decode(frame: bytes) -> AnyMessage:
    """One frame to a message.

    Raises:
        WireError: it is not what was sent, not JSON, of an unknown kind, or has fields that are missing, unknown or out
            of range.
    """
    text = frame[DIGEST_BYTES:]
    if seal(text) != frame:
        raise WireError(f"Malformed message: its {len(frame)} bytes do not begin with the digest of what follows.")
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        if error.error_count() > MAX_LISTED_ERRORS:  # each costs time and memory once it is looked at
            raise WireError(f"Malformed message: {error.error_count()} fields are wrong or unknown.") from None
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise WireError(f"Malformed message: {where[:MAX_QUOTED]}: {first['msg'][:MAX_QUOTED]}.") from error
