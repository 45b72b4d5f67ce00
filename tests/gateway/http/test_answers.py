"""What clients get when all goes well."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from kvrelay.messages import Abort, OutputAck
from kvrelay.types import FinishReason, Role
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.http.running import IM_END, IM_START, Client, Gateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def worker(shared: Gateway) -> FakeWorker:
    return shared.worker(1, Role.BOTH)


@pytest.fixture
def client(shared: Gateway) -> Client:
    return shared.client()


@pytest.fixture
def official(shared: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def ids(text: str) -> list[int]:
    return list(text.encode())


def answer(worker: FakeWorker, text: str, finish: FinishReason = LENGTH) -> None:
    """Generates a text at once; with `STOP`, an end-of-turn token follows it."""
    token_ids = ids(text) + ([IM_END] if finish is STOP else [])
    worker.send_tokens(worker.expect_prompt(), token_ids, finish=finish)


def test_a_chat(client: Client, worker: FakeWorker) -> None:
    client.post(CHAT, {"model": "tiny", "messages": HI})
    request = worker.expect_prompt()
    rendered = [IM_START, *ids("user\nhi"), IM_END, *ids("\n"), IM_START, *ids("assistant\n")]
    assert list(request.prompt_token_ids) == rendered
    assert request.params.max_tokens == 256 - len(rendered), "what is left of the context"
    worker.send_tokens(request, [*ids("Hello"), IM_END], finish=STOP)
    content = client.json()
    (choice,) = content["choices"]
    assert client.response.status == 200
    assert content["object"] == "chat.completion"
    assert content["id"] == f"chatcmpl-{request.request_id}"
    assert content["model"] == "tiny"
    assert content["system_fingerprint"] == "fp_ffffffffffff"
    assert content["created"] > 1_700_000_000
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert content["usage"] == {
        "prompt_tokens": len(rendered),
        "completion_tokens": 6,
        "total_tokens": len(rendered) + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert worker.expect(OutputAck).key == request.key


def test_a_completion(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": "Once"})
    request = worker.expect_prompt()
    assert list(request.prompt_token_ids) == ids("Once")
    assert request.params.max_tokens == 16
    worker.send_tokens(request, ids(" upon"), finish=LENGTH)
    content = client.json()
    assert content["object"] == "text_completion"
    assert content["choices"] == [{"index": 0, "text": " upon", "logprobs": None, "finish_reason": "length"}]
    assert content["usage"]["completion_tokens"] == 5


def test_usage_tells_how_much_of_the_prompt_was_cached(shared: Gateway, client: Client, worker: FakeWorker) -> None:
    before = shared.metric("kvrelay_cached_tokens_total")
    for stream in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        client.post(COMPLETIONS, {"prompt": "Once upon", **options})
        worker.send_tokens(worker.expect_prompt(), ids("ab"), finish=LENGTH, cached_tokens=8)
        usage = client.events()[-2]["usage"] if stream else client.json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
        assert usage["total_tokens"] == 11
    assert shared.metric("kvrelay_cached_tokens_total") == before + 16


def test_a_cache_salt_goes_to_the_workers(client: Client, worker: FakeWorker) -> None:
    for salt in ("", "of one user", "é" * 256):
        client.post(COMPLETIONS, {"prompt": "Once", "cache_salt": salt})
        request = worker.expect_prompt()
        assert request.cache_salt == salt
        worker.send_tokens(request, ids("a"), finish=LENGTH)
        assert client.response.status == 200
        client.json()


def test_a_stream_of_a_chat(client: Client, worker: FakeWorker) -> None:
    client.post(CHAT, {"messages": HI, "stream": True})
    request = worker.expect_prompt()
    worker.send_tokens(request, ids("H"))
    first = client.event()
    assert client.response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "H"}
    worker.send_tokens(request, ids("i"), start=1)
    second = client.event()
    assert second["choices"][0] == {"index": 0, "delta": {"content": "i"}, "logprobs": None, "finish_reason": None}
    assert "usage" not in second
    worker.send_tokens(request, [IM_END], start=2, finish=STOP)
    last, done = client.events()
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


def test_a_stream_of_a_completion_with_usage(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}})
    answer(worker, "bc")
    one, two, usage, done = client.events()
    assert [event["choices"][0]["text"] for event in (one, two)] == ["b", "c"]
    assert one["usage"] is two["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 3
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_serves_one_request_after_another(client: Client, worker: FakeWorker, stream: bool) -> None:
    for _ in range(3):
        client.post(COMPLETIONS, {"prompt": "a", "stream": stream})
        answer(worker, "b")
        assert client.response.status == 200
        client.response.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "tokens", "text", "num_tokens"),
    [
        ("END", "one END two", "one ", 7),
        (["two", "one"], "zero one two", "zero ", 8),
        ("\n\n", "a\n\nb", "a", 3),
        ("END", "one EN", "one EN", 6),
        ("a", "abc", "", 1),
    ],
)
def test_stop_strings(
    client: Client, worker: FakeWorker, stream: bool, stop: object, tokens: str, text: str, num_tokens: int
) -> None:
    """Each character is a token here, so stop strings lie across several."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    client.post(COMPLETIONS, {"prompt": "x", "stop": stop, "return_token_ids": True, **options})
    request = worker.expect_prompt()
    worker.send_tokens(request, ids(tokens), finish=LENGTH)
    if stream:
        *events, usage, _ = client.events()
        choices = [event["choices"][0] for event in events]
    else:
        usage = client.json()
        choices = usage["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == ("length" if tokens.endswith("EN") else "stop")
    assert usage["usage"]["completion_tokens"] == num_tokens
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == ids(tokens)[:num_tokens]


def test_a_stop_string_ends_the_work_at_the_worker(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": "x", "stop": "END"})
    request = worker.expect_prompt()
    worker.send_tokens(request, ids("so END"))
    assert client.json()["choices"][0]["finish_reason"] == "stop"
    assert worker.expect_abort(request.key).reason == "a stop string was found"


def test_the_first_token_ends_the_answer(client: Client, worker: FakeWorker) -> None:
    client.post(CHAT, {"messages": HI, "stream": True})
    answer(worker, "", STOP)
    only, done = client.events()
    assert only["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert only["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


def test_half_a_character_is_never_sent(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": "x", "stream": True})
    answer(worker, "né🙂")
    texts = [event["choices"][0]["text"] for event in client.events()[:-1]]
    assert texts == ["n", "é", "🙂"]


def test_a_character_cut_off_by_the_limit_is_replaced(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": "x"})
    worker.send_tokens(worker.expect_prompt(), ids("né")[:2], finish=LENGTH)
    assert client.json()["choices"][0]["text"] == "n\ufffd"


def test_special_tokens_are_no_text(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": "x", "ignore_eos": True})
    request = worker.expect_prompt()
    assert request.params.ignore_eos
    worker.send_tokens(request, [65, IM_END, 66], finish=LENGTH)
    content = client.json()
    assert content["choices"][0]["text"] == "AB"
    assert content["usage"]["completion_tokens"] == 3


def test_token_ids_are_given_where_asked_for(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": [5, 6], "return_token_ids": True, "stream": True})
    answer(worker, "né")
    *events, _ = client.events()
    choices = [event["choices"][0] for event in events]
    assert [choice["token_ids"] for choice in choices] == [[110], [0xC3], [0xA9]]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6], None, None]
    client.post(CHAT, {"messages": HI, "return_token_ids": True})
    answer(worker, "n")
    (choice,) = client.json()["choices"]
    assert choice["token_ids"] == [110]
    assert choice["prompt_token_ids"][0] == IM_START


def test_sampling_parameters_reach_the_worker(client: Client, worker: FakeWorker) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "max_completion_tokens": 9}
    client.post(CHAT, {"messages": HI, **asked})
    params = worker.expect_prompt().params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (7, 9, False)


def test_a_request_without_a_seed_gets_one(shared: Gateway, worker: FakeWorker) -> None:
    seeds = set()
    for body in ({"prompt": "x"}, {"prompt": "x"}, {"prompt": "x", "seed": None}, {"prompt": "x", "seed": -1}):
        shared.client().post(COMPLETIONS, body)
        seeds.add(worker.expect_prompt().params.seed)
    assert len(seeds) == 4
    assert 2**64 - 1 in seeds


def test_top_k_is_switched_off_by_minus_one(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": "x", "top_k": -1})
    assert worker.expect_prompt().params.top_k == 0


def test_more_tokens_than_fit_are_cut_to_the_context(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": [1] * 250, "max_tokens": 100})
    assert worker.expect_prompt().params.max_tokens == 6


def test_the_content_of_a_message_may_be_parts(client: Client, worker: FakeWorker) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.post(CHAT, {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]})
    prompt = bytes(token_id for token_id in worker.expect_prompt().prompt_token_ids if token_id < 256).decode()
    assert prompt == "system\nBe brief.\nuser\none\ntwo\nassistant\n"


def test_special_tokens_typed_by_a_user_are_text(client: Client, worker: FakeWorker) -> None:
    client.post(COMPLETIONS, {"prompt": "<|im_end|>"})
    assert list(worker.expect_prompt().prompt_token_ids) == ids("<|im_end|>")


def test_the_request_id_of_a_client_comes_back_and_never_collides(shared: Gateway, worker: FakeWorker) -> None:
    clients = [shared.client().post(COMPLETIONS, {"prompt": "x"}, **{"X-Request-Id": "mine"}) for _ in range(2)]
    requests = [worker.expect_prompt() for _ in clients]
    assert requests[0].request_id != requests[1].request_id
    for request in requests:
        worker.send_tokens(request, [65], finish=LENGTH)
    for client in clients:
        assert client.response.headers["x-request-id"] == "mine"
        assert client.json()["id"] in {f"cmpl-{request.request_id}" for request in requests}


@pytest.mark.parametrize("given", ["x" * 257, "two words", "caf\u00e9"])
def test_a_request_id_that_is_no_good_is_replaced(client: Client, given: str) -> None:
    client.connection.request("GET", "/health", headers={"X-Request-Id": given})
    client.response.read()
    assert client.response.headers["x-request-id"] not in ("", given)


def test_models_and_health(client: Client) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json()["object"] == "model"
    assert client.get("/health").json() == {"status": "ok"}


def test_metrics_tell_what_happened(shared: Gateway, client: Client, worker: FakeWorker) -> None:
    names = [
        'kvrelay_requests_total{outcome="length"}',
        "kvrelay_prompt_tokens_total",
        "kvrelay_generated_tokens_total",
        "kvrelay_ttft_seconds_count",
        "kvrelay_itl_seconds_count",
        "kvrelay_e2e_seconds_count",
    ]
    before = [shared.metric(name) for name in names]
    client.post(COMPLETIONS, {"prompt": "abc"})
    answer(worker, "defg")
    client.response.read()
    after = [shared.metric(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 3, 4, 1, 3, 1]
    assert shared.metric('kvrelay_kv_blocks{role="both",state="free",worker="both-1"}') == 7
    assert shared.metric('kvrelay_worker_events_total{event="stale_message",role="both",worker="both-1"}') == 2


# the official client


def test_the_official_client(official: openai.OpenAI, worker: FakeWorker) -> None:
    with ThreadPoolExecutor() as pool:
        messages: Any = HI
        chat = pool.submit(official.chat.completions.create, model="tiny", messages=messages, seed=1)
        answer(worker, "Hello", STOP)
        completion = chat.result()
        assert completion.choices[0].message.content == "Hello"
        assert completion.usage
        assert completion.usage.completion_tokens == 6
        text = pool.submit(official.completions.create, model="tiny", prompt="Once", max_tokens=3)
        answer(worker, "abc")
        assert text.result().choices[0].text == "abc"
        assert [model.id for model in official.models.list()] == ["tiny"]


def test_the_official_client_streams(official: openai.OpenAI, worker: FakeWorker) -> None:
    def collect() -> tuple[str, int]:
        messages: Any = HI
        stream = official.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[-1].usage
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return text, chunks[-1].usage.completion_tokens

    with ThreadPoolExecutor() as pool:
        collected = pool.submit(collect)
        answer(worker, "Hello", STOP)
        assert collected.result() == ("Hello", 6)


def test_the_official_client_raises_its_own_errors(official: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        official.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        official.completions.create(model="tiny", prompt="x", max_tokens=0)
    assert refused.value.param == "max_tokens"


def test_no_request_is_left(shared: Gateway, worker: FakeWorker) -> None:
    """The last test: requests above that were not answered end when their clients leave."""
    for client in shared.clients:
        client.close()
    worker.listen(0.0)
    while shared.cluster()["num_requests"]:
        worker.expect(Abort)
    assert shared.cluster()["workers"][0]["sent"] == {"prompt_tokens": 0, "sequences": 0}
