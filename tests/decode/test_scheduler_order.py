"""Prompts of different lengths that are computed beside decoding sequences."""

from kvrelay.types import SequenceStatus
from tests.decode.test_scheduler import Bench


def test_the_share_of_the_oldest_prompt_is_one_of_what_decoding_sequences_leave() -> None:
    bench = Bench(max_batch_tokens=12)
    sequences = [bench.add("long", 20), *(bench.adopt(name, 4) for name in "abcd"), bench.add("short", 7)]
    assert bench.step() == {"a": 1, "b": 1, "c": 1, "d": 1, "long": 2, "short": 6}
    bench.run()
    bench.check(*sequences)


def test_a_long_prompt_ends_though_short_ones_keep_coming_and_decode_beside_it() -> None:
    bench = Bench(max_batch_tokens=8, max_queue=100)
    sequences = [bench.add("long", 24)]
    while sequences[0].status in {SequenceStatus.WAITING, SequenceStatus.RUNNING} and len(sequences) < 60:
        sequences += [bench.add(f"short {len(sequences) + index}", 4, max_tokens=2) for index in range(2)]
        bench.step()
    assert len(sequences) < 60
    bench.run()
    bench.check(*sequences)
