"""The cache folder that the processes of a machine share: locks between them and remembered file digests."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrelay.errors import ModelError, StartError

_HEX_DIGEST_CHARS = 64


def make_folder(path: Path) -> Path:
    """Creates a folder with its parents. Raises StartError if that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(
            f"The cache folder {path} cannot be created: {error.strerror}; name another with --cache-dir."
        ) from error
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path` for this process; others wait. The kernel releases it when a holder dies."""
    make_folder(path.parent)
    try:
        file = path.open("a")
    except OSError as error:
        raise StartError(
            f"The lock file {path} cannot be written: {error.strerror}; name another folder with --cache-dir."
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a small file so that no reader sees a part of it. Raises StartError, e.g. for a full disk."""
    temporary = make_folder(path.parent) / f"{path.name}.{os.getpid()}.tmp"
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StartError(
            f"{path} cannot be written: {error.strerror}; make room there or name another folder with --cache-dir."
        ) from error


def file_digest(path: Path, cache_dir: Path) -> str:
    """SHA-256 of a file's content in hex, remembered by path, size, time of change and inode.

    Raises ModelError if the file cannot be read, StartError if the digest cannot be kept.
    """
    try:
        status = path.stat()
        identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
        remembered = cache_dir / "digests" / hashlib.sha256(os.fsencode(identity)).hexdigest()
        if (digest := _recall(remembered)) is None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            write_atomically(remembered, digest.encode())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; give a model that this user may read.") from error
    return digest


def _recall(remembered: Path) -> str | None:
    try:
        digest = remembered.read_bytes()
    except OSError:  # usually not there yet; if the folder cannot be used, the write that follows says so
        return None
    is_digest = len(digest) == _HEX_DIGEST_CHARS and not digest.strip(b"0123456789abcdef")
    return digest.decode() if is_digest else None
