"""Request bodies that are not refused, and what becomes of them."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from kvrelay.errors import InvalidRequest
from kvrelay.gateway import unsupported
from kvrelay.gateway.openai_api import MAX_MESSAGES, ChatBody, CompletionBody, Parsed, parse

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Parsed[ChatBody]:
    return parse(ChatBody, json.dumps({"messages": HI, **fields}).encode())


def completion(**fields: Any) -> Parsed[CompletionBody]:
    return parse(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())


@pytest.mark.parametrize("name", unsupported.CHAT)
def test_a_chat_field_at_its_default_asks_for_nothing(name: str) -> None:
    for default in (None, *unsupported.CHAT[name]):
        assert chat(**{name: default}).num_ignored == 0
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet"):
        chat(**{name: "something else"})


@pytest.mark.parametrize("name", unsupported.COMPLETION)
def test_a_completion_field_at_its_default_asks_for_nothing(name: str) -> None:
    for default in (None, *unsupported.COMPLETION[name]):
        assert completion(**{name: default}).num_ignored == 0
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet"):
        completion(**{name: ["something else"]})


def test_no_supported_field_is_listed_as_unsupported() -> None:
    assert not set(ChatBody.model_fields) & set(unsupported.CHAT)
    assert not set(CompletionBody.model_fields) & set(unsupported.COMPLETION)


def test_zero_is_not_false() -> None:
    """`logprobs: 0` asks for logprobs of the chosen tokens; false does not."""
    assert completion(logprobs=False).body.num_logprobs is None
    assert completion(logprobs=0).body.num_logprobs == 0


def test_what_sdks_send_back_is_taken() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    assert chat(messages=[*HI, answer]).num_ignored == 0
    assert chat(messages=[*HI, {**answer, "annotations": []}], stream=True, stream_options={"x": 1}).num_ignored == 2


def test_no_more_messages_or_parts_of_one_than_can_be_looked_at() -> None:
    part = {"type": "text", "text": ""}
    for messages in (HI * MAX_MESSAGES, [{**HI[0], "content": [part] * MAX_MESSAGES}]):
        chat(messages=messages)
    for messages in (HI * (MAX_MESSAGES + 1), [{**HI[0], "content": [part] * (MAX_MESSAGES + 1)}]):
        with pytest.raises(InvalidRequest, match=f"must have at most {MAX_MESSAGES} items, not a list of 10001"):
            chat(messages=messages)


@pytest.mark.parametrize(("given", "stop"), [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_stop(given: object, stop: list[str]) -> None:
    assert chat(stop=given).body.stop == stop


@pytest.mark.parametrize("stop", ["", ["a", ""], ["x" * 1025], [5]])
def test_stop_strings_that_are_wrong(stop: object) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        chat(stop=stop)


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, 100),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 1000}, 100),
    ],
)
def test_max_tokens_of_a_chat(fields: dict[str, int], max_tokens: int) -> None:
    assert chat(**fields).body.sampling_params(100).max_tokens == max_tokens


def test_max_tokens_of_a_completion() -> None:
    assert completion().body.sampling_params(100).max_tokens == 16
    assert completion().body.sampling_params(5).max_tokens == 5


def test_two_limits_that_differ_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is 3 and max_completion_tokens is 4"):
        chat(max_tokens=3, max_completion_tokens=4)


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_prompts(prompt: object) -> None:
    assert completion(prompt=prompt).body.prompt in ("ab", [97, 98])


def test_a_long_list_of_wrong_ids_is_refused_at_the_first() -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(prompt=[1, *["x"] * 200_000])
    assert refused.value.param == "prompt.1"
    assert isinstance(refused.value.__cause__, ValidationError)
    assert refused.value.__cause__.error_count() == 1


def test_errors_stay_short() -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(temperature="x" * 100_000)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("salt", ["x" * 257, 5, ["x"]])
def test_cache_salts_that_are_wrong(salt: object) -> None:
    with pytest.raises(InvalidRequest, match="cache_salt"):
        chat(cache_salt=salt)
    assert chat(cache_salt=None).body.cache_salt == ""
