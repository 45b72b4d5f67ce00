"""Token ids are the model's own, and what users type is never more than text."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from kvrelay.checkpoint import Checkpoint, CheckpointFormat
from kvrelay.errors import InvalidRequest, ModelError
from kvrelay.gateway.gguf_vocab import gguf_vocabulary
from kvrelay.gateway.segments import Segment
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.gateway.vocabulary import Vocabulary, byte_alphabet

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_token_ids.json").read_text(encoding="utf-8"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"]
TYPED = st.lists(TEXT | st.sampled_from(SPECIALS), max_size=6).map("".join)
LOST = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}  # bytes that the bundled model has no token for


def ids_of(tokenizer: Tokenizer, tokens: list[str]) -> list[int]:
    return [{text: index for index, text in enumerate(gguf()["tokenizer.ggml.tokens"])}[token] for token in tokens]


def gguf(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a small byte-level BPE: all bytes, some merges, and three tokens of other types."""
    merged = ["12", "123", "45", "'L", "'LL", "ab", "abc"]
    tokens = [*byte_alphabet(), *merged, "whole", "<s>", "<a tool>", "<unk>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 4, 2],
        "tokenizer.ggml.merges": ["1 2", "12 3", "4 5", "' L", "'L L", "a b", "ab c"],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eot_token_id": 7,
    }
    return {name: value for name, value in {**metadata, **changes}.items() if value is not None}


def tokens_of(pre: str, text: str) -> list[str]:
    tokenizer = Tokenizer(gguf_vocabulary(gguf(pre)))
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize("index", range(len(REFERENCE)))
def test_ids_equal_those_of_llama_cpp(smollm2: Tokenizer, index: int) -> None:
    assert smollm2.encode(REFERENCE[index]["text"]) == REFERENCE[index]["ids"]


@given(text=TEXT)
def test_decoding_gives_back_what_was_encoded(smollm2: Tokenizer, text: str) -> None:
    if LOST.isdisjoint(text.encode()):
        assert smollm2.decode(smollm2.encode(text)) == text


@given(text=TYPED)
def test_typed_special_tokens_are_text(smollm2: Tokenizer, text: str) -> None:
    assert not any(map(smollm2.is_special, smollm2.encode(text)))


@given(text=TYPED)
def test_the_lower_bound_is_one(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.min_tokens(text) <= len(smollm2.encode(text))


def test_the_lower_bound_grows_with_the_text_and_ignores_bytes_without_a_token(smollm2: Tokenizer) -> None:
    assert smollm2.min_tokens("a" * 1_000_000) > 12_000
    assert smollm2.min_tokens("\x04" * 1_000_000) == 0 == len(smollm2.encode("\x04"))


def test_the_lower_bound_allows_for_text_that_normalising_shortens() -> None:
    tokenizer = gguf_vocabulary(gguf()).tokenizer
    tokenizer.normalizer = normalizers.NFC()
    syllable = "\u1112\u1161\u11ab" * 100  # three letters each, one syllable after normalising
    composed = Tokenizer(Vocabulary(tokenizer, {}, frozenset(), None))
    assert composed.min_tokens(syllable) == 38  # 900 bytes, a third of them certain, at most 8 in a token
    assert len(composed.encode(syllable)) == 300


def test_special_tokens_become_ids_where_that_is_asked_for(smollm2: Tokenizer) -> None:
    assert smollm2.encode("<|im_start|>a<|im_end|>", allow_special=True) == [1, *smollm2.encode("a"), 2]
    assert smollm2.encode_segments([Segment("<|im_end|>", special=True), Segment("<|im_end|>")])[1:] == smollm2.encode(
        "<|im_end|>"
    )
    with pytest.raises(InvalidRequest, match="'<none>' is not a special token"):
        smollm2.encode_segments([Segment("<none>", special=True)])


def test_decoding_skips_special_tokens_if_asked_to_and_unknown_ones_always(smollm2: Tokenizer) -> None:
    ids = [1, *smollm2.encode("a"), 49152, -1, 2]
    assert smollm2.decode(ids) == "a"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"
    assert smollm2.token_bytes(-1) == smollm2.token_bytes(49152) == b""


def test_the_bundled_model_says_what_it_is(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.eos_token_ids) == (49152, frozenset({2}))
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.special_tokens["<|im_end|>"] == 2
    assert smollm2.encode("a", add_bos=True) == smollm2.encode("a")
    assert b"".join(map(smollm2.token_bytes, smollm2.encode("é👧"))) == "é👧".encode()


def test_half_a_surrogate_pair_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"'\\ud83d', half of a surrogate pair, at character 1"):
        smollm2.encode("a\ud83d")


def test_megabytes_in_one_word_are_encoded_in_time_while_other_threads_run(smollm2: Tokenizer) -> None:
    thread = threading.Thread(target=smollm2.encode, args=("a" * 4_000_000,), daemon=True)
    begin = last = time.monotonic()
    cpu_s, longest_wait_s = -time.process_time(), 0.0
    thread.start()
    running = True
    while running:
        running = thread.is_alive()
        time.sleep(0.001)
        now = time.monotonic()
        longest_wait_s, last = max(longest_wait_s, now - last), now
    cpu_s += time.process_time()
    assert cpu_s < 30  # others may use the cores too
    assert longest_wait_s < (last - begin) / 2


def test_pre_tokenizers_cut_as_llama_cpp_does() -> None:
    assert tokens_of("smollm", "12345") == ["1", "2", "3", "4", "5"]
    assert tokens_of("qwen2", "12345") == ["1", "2", "3", "4", "5"]
    assert tokens_of("gpt-2", "12345") == ["123", "45"]
    assert tokens_of("default", "34512") == ["3", "45", "12"]
    assert tokens_of("default", "00123") == ["0", "0", "1", "2", "3"]  # 001, 23
    assert tokens_of("gpt-2", "12312") == ["123", "12"]
    assert tokens_of("llama-bpe", "45123") == ["45", "1", "2", "3"]  # 451, 23: three digits at a time
    assert tokens_of("qwen2", "x'LL") == ["x", "'LL"]
    assert tokens_of("gpt-2", "x'LL") == ["x", "'", "L", "L"]


def test_llama_3_takes_whole_words_and_begins_texts() -> None:
    tokenizer = Tokenizer(gguf_vocabulary(gguf("llama-bpe")))
    whole, bos = ids_of(tokenizer, ["whole", "<s>"])
    assert tokenizer.encode("whole", add_bos=True) == [bos, whole]
    assert len(Tokenizer(gguf_vocabulary(gguf("gpt-2"))).encode("whole")) == 5
    assert tokenizer.eos_token_ids == {bos, 7}


def test_bos_follows_the_file_where_it_says_so() -> None:
    (bos,) = ids_of(Tokenizer(gguf_vocabulary(gguf())), ["<s>"])
    switched = {"tokenizer.ggml.add_bos_token": True}
    assert Tokenizer(gguf_vocabulary(gguf("gpt-2", **switched))).encode("", add_bos=True) == [bos]
    assert Tokenizer(gguf_vocabulary(gguf("gpt-2"))).encode("", add_bos=True) == []


def test_user_defined_tokens_are_found_in_text_and_control_tokens_are_not() -> None:
    tokenizer = Tokenizer(gguf_vocabulary(gguf()))
    tool, *special = ids_of(tokenizer, ["<a tool>", "<s>", "<unk>"])
    assert tokenizer.encode("<s><a tool><unk>") == [*tokenizer.encode("<s>"), tool, *tokenizer.encode("<unk>")]
    assert len(tokenizer.encode("<s>")) == 3
    assert tokenizer.decode([tool]) == "<a tool>"
    assert [tokenizer.is_special(token_id) for token_id in [tool, *special]] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.pre": "viking"}, "'viking' is not supported, only default, gpt-2, llama-bpe"),
        ({"tokenizer.ggml.model": "llama"}, "of the kind 'llama', but only 'gpt2'"),
        ({"tokenizer.ggml.model": None}, "of the kind None"),
        ({"tokenizer.ggml.tokens": None}, "damaged"),
        ({"tokenizer.ggml.token_type": [1]}, "damaged"),
        ({"tokenizer.ggml.merges": ["1 2", "12"]}, "merge '12' is not a pair"),
        ({"tokenizer.ggml.merges": ["1 nowhere"]}, "damaged"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "damaged"),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_used_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        gguf_vocabulary(gguf(**changes))


def write_folder(folder: Path, tokenizer: tokenizers.Tokenizer, **files: Any) -> Checkpoint:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Checkpoint("test", folder, CheckpointFormat.HF, "0")


def metaspace() -> tokenizers.Tokenizer:
    """A tokenizer of the newer SentencePiece kind: a space is put before the first word of a prompt only."""
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<s>", AddedToken("</s>", rstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def test_a_hugging_face_folder_says_what_it_is(tmp_path: Path) -> None:
    tokenizer = metaspace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ 1 }}", "pad_token": None}
    files = {"tokenizer_config": settings, "generation_config": {"eos_token_id": [2, 5]}, "config": {"eos_token_id": 1}}
    loaded = Tokenizer.load(write_folder(tmp_path, tokenizer, **files))
    assert loaded.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (loaded.eos_token_ids, loaded.vocab_size) == (frozenset({2, 5}), 6)
    assert loaded.chat_template == "{{ 1 }}"
    assert loaded.encode("aaaa", add_bos=True) == [1, 5, 4, 4, 4]  # neither cut, nor padded, nor ended
    assert loaded.decode([1, 5, 4, 2]) == "aa"


def test_the_end_of_text_is_found_wherever_a_folder_names_it(tmp_path: Path) -> None:
    eos = {"eos_token": "</s>"}
    assert Tokenizer.load(write_folder(tmp_path, metaspace())).eos_token_ids == frozenset()
    assert Tokenizer.load(write_folder(tmp_path, metaspace(), tokenizer_config=eos)).eos_token_ids == {2}
    assert Tokenizer.load(write_folder(tmp_path, metaspace(), config={"eos_token_id": 4})).eos_token_ids == {4}


def test_a_folder_may_keep_its_template_in_a_file_or_under_a_name(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    checkpoint = write_folder(tmp_path, metaspace(), tokenizer_config={"chat_template": named})
    assert Tokenizer.load(checkpoint).chat_template == "yes"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert Tokenizer.load(checkpoint).chat_template == "own"


@pytest.mark.parametrize("text", ["a<s>a", "<s>a a", "a</s>  a<s>", "<s><s>", "a a"])
def test_segments_give_the_ids_that_the_whole_text_has(text: str) -> None:
    plain = metaspace()
    expected = plain.encode(text, add_special_tokens=False).ids
    tokenizer = Tokenizer(Vocabulary(metaspace(), {}, frozenset(), None))
    assert tokenizer.encode(text, allow_special=True) == expected
    assert {1, 2}.isdisjoint(tokenizer.encode(text))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model": {"type": "Odd"}}'])
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"has no tokenizer\.json" if content is None else "not a valid tokenizer"):
        Tokenizer.load(Checkpoint("test", tmp_path, CheckpointFormat.HF, "0"))


@pytest.mark.parametrize("eos", ["</s>", [-1], [2, "x"], True])
def test_an_end_of_text_that_is_no_id_is_refused(tmp_path: Path, eos: object) -> None:
    checkpoint = write_folder(tmp_path, metaspace(), generation_config={"eos_token_id": eos})
    with pytest.raises(ModelError, match="as eos_token_id"):
        Tokenizer.load(checkpoint)
