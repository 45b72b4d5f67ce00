"""The mailbox of one answer, and its text."""

import asyncio

import pytest

from kvrelay.errors import WorkerLost
from kvrelay.events import RequestTimeline
from kvrelay.gateway.generation import MAX_TAKEN, AnswerText, Generation, Token
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.types import FinishReason
from tests.gateway.nouns import token


def generation() -> Generation:
    return Generation("r", (1,), RequestTimeline(0.0))


def test_tokens_are_taken_in_order_and_then_the_error() -> None:
    async def main() -> None:
        some = generation()
        some.put([token(0), token(1)])
        some.end(WorkerLost("It died."))
        assert [each.token_id for each in await some.take()] == [100, 101]
        for _ in range(2):
            with pytest.raises(WorkerLost):
                await some.take()

    asyncio.run(main())


def test_a_complete_answer_gives_no_more() -> None:
    async def main() -> None:
        some = generation()
        some.end(None)
        assert await some.take() == []

    asyncio.run(main())


def test_a_waiting_reader_is_woken() -> None:
    async def main() -> None:
        some = generation()
        reader = asyncio.create_task(some.take())
        await asyncio.sleep(0)
        some.put([token(0)])
        assert len(await reader) == 1

    asyncio.run(main())


def test_little_is_taken_at_once() -> None:
    async def main() -> None:
        some = generation()
        some.put([token(index) for index in range(MAX_TAKEN + 1)])
        assert len(await some.take()) == MAX_TAKEN
        assert len(await some.take()) == 1

    asyncio.run(main())


def test_the_text_of_a_real_vocabulary(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Hello, wörld! 🙂 END of it")
    text = AnswerText(smollm2, (1, 2), ["END"])
    pieces = []
    for token_id in ids:
        pieces.append(text.push(Token(token_id, None)))
        if text.finish_reason:
            break
    assert "".join(piece.text for piece in pieces) == "Hello, wörld! 🙂 "
    assert text.finish_reason is FinishReason.STOP
    assert text.num_tokens == len(pieces) < len(ids)
    with pytest.raises(ValueError, match="ended"):
        text.push(Token(1, None))


def test_each_token_knows_where_its_text_begins(smollm2: Tokenizer) -> None:
    """Also while a stop string may have begun; several tokens of one character begin where it does."""
    ids = smollm2.encode("ab 🙂🙂 cd")
    text = AnswerText(smollm2, (1, 2), ["🙂🙂 c!"])
    offsets = [text.push(Token(token_id, None)).offset for token_id in ids]
    whole = [smollm2.decode(ids[:count]) for count in range(len(ids))]
    assert offsets == [len(before.rstrip("\ufffd")) for before in whole]
    assert len(set(offsets)) < len(offsets)


def test_the_token_that_ends_a_sample_is_no_text(smollm2: Tokenizer) -> None:
    """Whatever it is: also one that would be text elsewhere."""
    text = AnswerText(smollm2, (1, 2), [])
    word, end = smollm2.encode("so be")
    assert text.push(Token(word, None)).text == "so"
    assert text.push(Token(end, FinishReason.STOP)).text == ""
    assert text.num_tokens == 2


def test_what_was_held_back_comes_at_the_end(smollm2: Tokenizer) -> None:
    text = AnswerText(smollm2, (1, 2), ["stop here"])
    first, *ids = smollm2.encode("please stop")
    assert text.push(Token(first, None)).text
    pieces = [text.push(Token(token_id, None)) for token_id in ids[:-1]]
    pieces.append(text.push(Token(ids[-1], FinishReason.LENGTH)))
    assert "".join(piece.text for piece in pieces).endswith("stop")
    assert text.finish_reason is FinishReason.LENGTH
