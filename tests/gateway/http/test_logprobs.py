"""Logprobs in the two forms of OpenAI's API, streamed and not, to the last bit."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from kvrelay.types import FinishReason, Role, TokenLogprobs, TopLogprob
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.http.running import IM_END, Client, Gateway
from tests.gateway.nouns import top_logprobs

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
ODD = -0.1 - 2**-56  # nothing but all of its digits gives it back
HALF = 0xC3  # a byte that begins a character


@pytest.fixture(scope="module")
def worker(shared: Gateway) -> FakeWorker:
    return shared.worker(1, Role.BOTH)


@pytest.fixture
def client(shared: Gateway) -> Client:
    return shared.client()


def answer(worker: FakeWorker, token_ids: list[int], *told: TokenLogprobs) -> None:
    finish = FinishReason.STOP if token_ids[-1] == IM_END else FinishReason.LENGTH
    worker.send_tokens(worker.expect_prompt(), token_ids, finish=finish, logprobs=told)


def likely(*pairs: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(ODD, tuple(TopLogprob(*pair) for pair in pairs))


def test_a_completion(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": "a", "logprobs": 2})
    told = likely((ord("b"), -0.5), (HALF, -1.25))
    answer(worker, [ord("b"), HALF, 0xA9, ord("x")], told, told, told, told)
    (choice,) = client.json()["choices"]
    assert choice["text"] == "béx"
    top = {"b": -0.5, "bytes:\\xc3": -1.25}
    assert choice["logprobs"] == {
        "tokens": ["b", "bytes:\\xc3", "bytes:\\xa9", "x"],
        "token_logprobs": [ODD] * 4,
        "top_logprobs": [top, top, {**top, "bytes:\\xa9": ODD}, {**top, "x": ODD}],
        "text_offset": [0, 1, 1, 2],
    }


def test_a_chat(client: Client, worker: FakeWorker) -> None:
    client.post(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1})
    answer(worker, [ord("b"), IM_END], likely((HALF, ODD)), likely((IM_END, 0.0)))
    (choice,) = client.json()["choices"]
    half = {"token": "\\xc3", "logprob": ODD, "bytes": [HALF]}
    end = {"token": "<|im_end|>", "bytes": list(b"<|im_end|>")}
    assert choice["message"]["content"] == "b"
    assert choice["logprobs"] == {
        "content": [
            {"token": "b", "logprob": ODD, "bytes": [98], "top_logprobs": [half]},
            {**end, "logprob": ODD, "top_logprobs": [{**end, "logprob": 0.0}]},
        ],
        "refusal": None,
    }


@pytest.mark.parametrize(
    ("path", "asked", "wanted"),
    [
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 20}, 20),
        (COMPLETIONS, {"logprobs": False}, None),
        (COMPLETIONS, {}, None),
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 20),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, None),
        (CHAT, {}, None),
    ],
)
def test_workers_are_asked_for_as_many_and_only_then(
    client: Client, worker: FakeWorker, path: str, asked: dict[str, Any], wanted: int | None
) -> None:
    client.post(path, {"messages": HI, "prompt": "a", **asked})
    request = worker.expect_prompt()
    assert request.params.logprobs == wanted
    told = () if wanted is None else (top_logprobs(wanted),)
    worker.send_tokens(request, [98], finish=FinishReason.LENGTH, logprobs=told)
    logprobs = client.json()["choices"][0]["logprobs"]
    assert (logprobs is None) == (wanted is None)
    if path == CHAT and wanted is not None:
        assert len(logprobs["content"][0]["top_logprobs"]) == wanted


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_tells_them_with_each_token_also_where_there_is_no_text(
    client: Client, worker: FakeWorker, path: str
) -> None:
    """The first token's logprobs are lost (TensorRT-LLM PR#11727); only list lengths were tested."""
    asked = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    client.post(path, {"messages": HI, "prompt": "a", "stream": True, **asked})
    told = [TokenLogprobs(ODD * count, (TopLogprob(97, -float(count)),)) for count in (1, 2, 3, 4)]
    answer(worker, [98, HALF, 0xA9, IM_END], *told)
    *events, done = client.events()
    assert done == "[DONE]"
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    if path == CHAT:
        assert [len(each["content"]) for each in logprobs] == [1, 1, 1, 1]
        assert [each["content"][0]["logprob"] for each in logprobs] == [ODD, ODD * 2, ODD * 3, ODD * 4]
    else:
        assert [each["token_logprobs"] for each in logprobs] == [[ODD], [ODD * 2], [ODD * 3], [ODD * 4]]
        assert [each["top_logprobs"][0]["a"] for each in logprobs] == [-1.0, -2.0, -3.0, -4.0]
        assert [each["text_offset"] for each in logprobs] == [[0], [1], [1], [2]]


def test_tokens_can_be_named_by_their_ids(client: Client, worker: FakeWorker) -> None:
    for path, asked in ((CHAT, {"logprobs": True, "top_logprobs": 1}), (COMPLETIONS, {"logprobs": 1})):
        options = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        client.post(path, {"messages": HI, "prompt": "a", **options, **asked})
        answer(worker, [98, IM_END], likely((97, -0.5)), likely((98, -0.25)))
        (choice,) = client.json()["choices"]
        assert choice["token_ids"] == [98, IM_END]
        if path == CHAT:
            entries = choice["logprobs"]["content"]
            assert [entry["token"] for entry in entries] == ["token_id:98", f"token_id:{IM_END}"]
            assert entries[0]["top_logprobs"] == [{"token": "token_id:97", "logprob": -0.5, "bytes": [97]}]
        else:
            assert choice["logprobs"]["tokens"] == ["token_id:98", f"token_id:{IM_END}"]
            assert choice["logprobs"]["top_logprobs"][0] == {"token_id:97": -0.5, "token_id:98": ODD}


def test_the_official_client_reads_them(shared: Gateway, worker: FakeWorker) -> None:
    messages: Any = HI
    with (
        openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0, timeout=20) as official,
        ThreadPoolExecutor() as pool,
    ):
        create = official.chat.completions.create
        chat = pool.submit(create, model="tiny", messages=messages, logprobs=True, top_logprobs=1)
        answer(worker, [98], likely((97, -0.5)))
        told = chat.result().choices[0].logprobs
        assert told is not None
        assert told.content is not None
        assert (told.content[0].logprob, told.content[0].top_logprobs[0].token) == (ODD, "a")
        text = pool.submit(official.completions.create, model="tiny", prompt="a", logprobs=1)
        answer(worker, [98], likely((97, -0.5)))
        lists = text.result().choices[0].logprobs
        assert lists is not None
        assert (lists.token_logprobs, lists.top_logprobs) == ([ODD], [{"a": -0.5, "b": ODD}])


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": 1.0}, "logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_is_wrong_is_named(client: Client, path: str, given: dict[str, Any], param: str) -> None:
    error = client.post(path, {"messages": HI, "prompt": "a", **given}).json()["error"]
    assert client.response.status == 400
    assert error["param"] == param
    assert param in error["message"]
