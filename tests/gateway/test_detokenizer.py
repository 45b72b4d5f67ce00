"""The pieces of a sample's text make up exactly what decoding all of its tokens gives."""

from collections.abc import Iterable, Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from kvrelay.gateway.detokenizer import Detokenizer
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.gateway.vocabulary import Vocabulary

EMOJI = "👩‍👩‍👧 日本語 é"


def detokenize(tokenizer: Tokenizer, pieces: Iterable[Sequence[int]], prompt: Sequence[int] = ()) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join([*map(detokenizer.push, pieces), detokenizer.flush()])


def wrap(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(Vocabulary(tokenizer, {}, frozenset(), None))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """A tokenizer of the Llama 2 kind: pieces with U+2581 for spaces, and a token per byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab", "\u65e5"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(tokenizer)


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    """A tokenizer whose tokens have no bytes of their own: whether a space comes before one depends on what it is."""
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "chess": 3, "!": 4, "##s": 5}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return wrap(tokenizer)


@given(pieces=st.lists(st.lists(st.integers(0, 49151), max_size=5), max_size=20))
def test_any_tokens_in_any_pieces_give_what_decoding_all_gives(smollm2: Tokenizer, pieces: list[list[int]]) -> None:
    assert detokenize(smollm2, pieces) == smollm2.decode([token_id for piece in pieces for token_id in piece])


@given(ids=st.lists(st.integers(100, 272), max_size=30))
def test_broken_characters_become_what_decoding_all_makes_of_them(smollm2: Tokenizer, ids: list[int]) -> None:
    # These ids are mostly single bytes over 0x7F, whose sequences are rarely UTF-8.
    assert detokenize(smollm2, [[token_id] for token_id in ids]) == smollm2.decode(ids)


@given(text=st.text(max_size=20) | st.just(EMOJI))
def test_no_piece_has_half_a_character(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    detokenizer, so_far = Detokenizer(smollm2), ""
    for token_id in ids:
        so_far += detokenizer.push([token_id])
        assert smollm2.decode(ids).startswith(so_far)


def test_an_emoji_over_several_tokens_waits_until_it_is_whole(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("👧")
    detokenizer = Detokenizer(smollm2)
    assert len(ids) > 1
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["👧"]


def test_an_unfinished_character_ends_as_a_replacement(smollm2: Tokenizer) -> None:
    assert detokenize(smollm2, [smollm2.encode("👧")[:-1]]) == "\ufffd"


def test_special_and_unknown_tokens_have_no_text(smollm2: Tokenizer) -> None:
    assert detokenize(smollm2, [smollm2.encode("a"), [2, 10**6, -1], smollm2.encode("b")]) == "ab"


@given(ids=st.lists(st.integers(0, 262), max_size=30))
def test_sentencepiece_equals_decoding_all(sentencepiece: Tokenizer, ids: list[int]) -> None:
    assert detokenize(sentencepiece, [[token_id] for token_id in ids]) == sentencepiece.decode(ids)


def test_sentencepiece_strips_the_first_space_of_a_text_but_not_of_a_continuation(sentencepiece: Tokenizer) -> None:
    ids = [260, 261, 260]
    assert detokenize(sentencepiece, [ids]) == "aab a"
    assert detokenize(sentencepiece, [ids], prompt=[258]) == " aab a"


@given(ids=st.lists(st.integers(0, 5), max_size=30))
def test_tokens_that_depend_on_their_neighbours_equal_decoding_all(words: Tokenizer, ids: list[int]) -> None:
    assert detokenize(words, [[token_id] for token_id in ids]) == words.decode(ids)


def test_a_continuation_keeps_the_space_before_its_first_word(words: Tokenizer) -> None:
    assert detokenize(words, [[1, 2], [3]]) == "playing chess"
    assert detokenize(words, [[2], [3]], prompt=[4, 1]) == "ing chess"
    assert detokenize(words, [[3]], prompt=[1, 2]) == " chess"


def test_a_token_costs_the_same_however_long_the_text_is(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    decode = words.decode

    def spy(ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(list(ids)))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(words, "decode", spy)
    detokenize(words, [[token_id % 6] for token_id in range(2000)])
    assert len(lengths) <= 2 * 2001
    assert max(lengths) <= 22
