"""Whatever comes over a socket is understood or a WireError, soon, in little memory, and told in few words.

What is drawn follows from SEED and the number of the batch, so a failure comes again.
"""

import itertools
import resource
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kvrelay.block_memory import Geometry
from kvrelay.encoding import DIGEST_BYTES, decode, encode, seal
from kvrelay.errors import WireError
from kvrelay.messages import (
    Message,
)
from kvrelay.transfer.protocol.piece import PieceHeader, check_piece, pack, unpack
from kvrelay.transfer.shm_frames import (
    TOKEN_BYTES,
    Address,
    Hello,
    pack_geometry,
    parse_address,
    unpack_geometry,
    unpack_hello,
)
from tests.fuzz.drawn import messages
from tests.fuzz.edits import changed_bytes, changed_json
from tests.transfer.test_piece import headers

SEED = 1
BATCH = 100  # examples of one kind before it is the next one's turn
MAX_CPU_S = 5.0  # for one frame; far above what any takes, far below what a blow-up would
MAX_GROWTH_BYTES = 512 * 2**20
MAX_WORDS = 1000  # letters of a sentence that is logged

BATCHES = settings(
    max_examples=BATCH,
    deadline=None,  # `check` has one that does not depend on what else the machine does
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
HELLOS = st.builds(Hello, U64, U64, st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES))
GEOMETRIES = st.builds(Geometry, U32, U64, U64)
NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=64)
ADDRESSES = st.builds(Address, NAMES, NAMES, st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES))


def check(survives: Callable[[], bool]) -> None:
    """Runs to the end, saying True, or is refused in the one way there is."""
    begin = time.process_time()
    try:
        assert survives()
        sentence = ""
    except WireError as error:
        sentence = str(error)
    assert len(sentence) <= MAX_WORDS
    assert time.process_time() - begin < MAX_CPU_S


@BATCHES
@given(messages(), st.data())
def a_message(message: Message, data: st.DataObject) -> None:
    """The same after a round trip; changed, it is another message or refused."""
    frame = encode(message)
    assert decode(frame) == message
    check(lambda: _is_stable(data.draw(changed_bytes(frame))))
    text = data.draw(changed_json(frame[DIGEST_BYTES:]))
    check(lambda: _is_stable(seal(text)))
    changed = data.draw(changed_bytes(text))
    check(lambda: _is_stable(seal(changed)))


def _is_stable(frame: bytes) -> bool:
    """What was understood can be said, and is understood again."""
    message = decode(frame)
    return decode(encode(message)) == message


@BATCHES
@given(headers(), st.data())
def a_header(header: PieceHeader, data: st.DataObject) -> None:
    """Every byte of one that is understood means something; a payload of another size is refused."""
    frame = pack(header)
    assert unpack(frame) == header
    changed = data.draw(changed_bytes(frame))
    check(lambda: pack(unpack(changed)) == changed and _adds_up(unpack(changed)))
    payload = bytes(data.draw(st.integers(0, 2**16) | st.just(min(header.payload_bytes, 2**22))))
    check(lambda: _is_whole(frame, payload) and len(payload) == header.payload_bytes)
    check(lambda: _is_whole(changed, payload))


def _is_whole(frame: bytes, payload: bytes) -> bool:
    check_piece(frame, payload)
    return True


def _adds_up(header: PieceHeader) -> bool:
    num_rows = 2 * header.num_layers * header.num_blocks * header.num_heads * header.block_size
    return 0 < num_rows * header.row_bytes == header.payload_bytes


@BATCHES
@given(HELLOS, st.data())
def a_hello(hello: Hello, data: st.DataObject) -> None:
    """Of shared memory."""
    frame = hello.pack()
    assert unpack_hello(frame) == hello
    changed = data.draw(changed_bytes(frame))
    check(lambda: unpack_hello(changed).pack() == changed)


@BATCHES
@given(GEOMETRIES, st.data())
def a_geometry(geometry: Geometry, data: st.DataObject) -> None:
    """Of shared memory."""
    frame = pack_geometry(geometry)
    assert unpack_geometry(frame) == geometry
    changed = data.draw(changed_bytes(frame))
    check(lambda: pack_geometry(unpack_geometry(changed)) == changed)


@BATCHES
@given(ADDRESSES, st.data())
def an_address(address: Address, data: st.DataObject) -> None:
    """Of shared memory, as it is told among a worker's endpoints."""
    assert parse_address(str(address)) == address
    changed = data.draw(changed_bytes(str(address).encode())).decode(errors="replace")
    check(lambda: parse_address(str(parse_address(changed))) == parse_address(changed))


KINDS = (a_message, a_header, a_hello, a_geometry, a_message, an_address)  # messages twice: there is most to them


@pytest.mark.parametrize(
    "seconds", [20, pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(900)])], ids="{} s".format
)
def test_nothing_but_a_wire_error_ever_comes_of_a_frame(seconds: float) -> None:
    begin, most = time.monotonic(), _peak_bytes()
    for number in itertools.count():
        if time.monotonic() - begin > seconds:
            break
        _run(KINDS[number % len(KINDS)], number)
    assert _peak_bytes() - most < MAX_GROWTH_BYTES


def _run(kind: Callable[[], None], number: int) -> None:
    try:
        seed(SEED + number)(kind)()
    except Exception as error:
        error.add_note(f"This was batch {number} of seed {SEED}, {kind.__name__}.")
        raise


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
