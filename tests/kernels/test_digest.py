"""The digest of bytes on a device: what its docstring says, the same from both twins, another one after any damage."""

import random
import struct
from types import ModuleType

import pytest
import torch

from kvrelay.kernels.digest import digest_bytes
from tests.kernels.interpreted import load_kernels

NUM_WORDS = (1, 2, 3, 5, 127, 128, 129, 2047, 2048, 2049, 5000)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Interpreted: the very code of the kernel, on tensors of the CPU."""
    return load_kernels("digest_triton", interpreted=True)


def content(num_words: int) -> bytes:
    return random.Random(num_words).randbytes(4 * num_words)


def digest(given: bytes) -> int:
    """The twin's."""
    out = torch.full((1,), -7)
    digest_bytes(torch.frombuffer(bytearray(given), dtype=torch.uint8) if given else torch.empty(0).byte(), out)
    return int(out)


def definition(given: bytes) -> int:
    """The docstring of the module in integers of Python."""
    total = 0
    for place, (word,) in enumerate(struct.iter_unpack("<I", given)):
        state = place << 32 | word
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        total += state ^ state >> 31
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("num_words", [0, *NUM_WORDS])
def test_it_is_what_its_docstring_says(num_words: int) -> None:
    assert digest(content(num_words)) == definition(content(num_words))


@pytest.mark.parametrize("given", [bytes(400), b"\xff" * 400, b"\0\0\0\x80" * 100])
def test_words_of_equal_or_extreme_bits_are_no_exception(kernels: ModuleType, given: bytes) -> None:
    out = torch.full((1,), 9)
    kernels.digest(torch.frombuffer(bytearray(given), dtype=torch.int32), out)
    assert int(out) == digest(given) == definition(given)


@pytest.mark.parametrize("width", [16, 128, 2048])
@pytest.mark.parametrize("num_words", NUM_WORDS)
def test_the_kernel_gives_the_same_in_programs_of_any_size(kernels: ModuleType, num_words: int, width: int) -> None:
    out = torch.full((1,), 9)
    words = torch.frombuffer(bytearray(content(num_words) + b"beyond the end.."), dtype=torch.int32)[:num_words]
    kernels.digest(words, out, width)
    assert int(out) == digest(content(num_words))


def test_every_flipped_bit_is_noticed() -> None:
    given = bytearray(content(33))
    found = {digest(bytes(given))}
    for bit in range(8 * len(given)):
        given[bit // 8] ^= 1 << bit % 8
        found.add(digest(bytes(given)))
        given[bit // 8] ^= 1 << bit % 8
    assert len(found) == 8 * len(given) + 1


def test_words_and_blocks_that_changed_places_are_noticed() -> None:
    given = content(64)
    words = [given[i : i + 4] for i in range(0, len(given), 4)]
    found = {digest(given), digest(given[128:] + given[:128]), digest(given[4:] + given[:4])}
    for first in range(63):
        swapped = [*words[:first], words[first + 1], words[first], *words[first + 2 :]]
        found.add(digest(b"".join(swapped)))
    assert len(found) == 66


def test_what_is_missing_or_too_much_is_noticed_though_it_be_zeros() -> None:
    assert len({digest(bytes(4 * num_words)) for num_words in range(2, 200)}) == 198


@pytest.mark.parametrize(
    ("given", "out"),
    [
        (torch.zeros(6, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(9, dtype=torch.uint8)[1:], torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(16, dtype=torch.uint8)[::2], torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)),
        (torch.zeros(8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64, device="meta")),
    ],
)
def test_what_has_no_digest_is_refused(given: torch.Tensor, out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="no digest"):
        digest_bytes(given, out)
