"""What clients send: OpenAI's request bodies, checked. Everything that is wrong becomes InvalidRequest with a name."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails, from_json

from kvrelay.errors import InvalidRequest
from kvrelay.gateway import unsupported
from kvrelay.types import MAX_LOGPROBS, SamplingParams, TokenId

MAX_STOP = 16
MAX_MESSAGES = 10_000  # and parts of one: each costs time before its text is looked at
_MAX_STOP_CHARACTERS = 1024
_MAX_INT = 2**31 - 1
_SHOULD = re.compile(r"(?:Input|List|String) should (.*?)(?: or instance of \w+)?(?: after validation, not \d+)?")
_TAG = "as "  # begins the names of alternatives, which are no part of a field's name


def _kind(value: object) -> str | None:
    if isinstance(value, str):
        return "as text"
    return "as list" if isinstance(value, list) else None


def _one_prompt(value: object) -> object:
    """OpenAI takes several prompts at once. A list with one is one."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError("lists of several prompts are not supported yet; send one request for each")
        return value[0]
    return value


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _unless_false(value: object) -> object:
    """As in a chat, false asks for none; 0 asks for those of the generated tokens."""
    return None if value is False else value


def _not_empty(value: str | list[Any]) -> str | list[Any]:
    if not value:
        raise ValueError("it is empty; there must be something to continue")
    return value


StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("as text")] | Annotated[TokenIds, Tag("as list")],
    Discriminator(_kind, custom_error_type="prompt", custom_error_message="expected a string or a list of token ids"),
    BeforeValidator(_one_prompt),
    AfterValidator(_not_empty),
]


class _Strict(BaseModel):
    """Types are taken at their word: "1" is no number and 1 is no boolean."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class TextPart(_Strict):
    """A piece of a message. Pictures and sound are not supported."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("as text")]
    | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("as list")],
    Discriminator(_kind, custom_error_type="content", custom_error_message="expected a string or a list of text parts"),
]


class ChatMessage(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it; `developer` is what OpenAI calls the system role by now."""
        plain = self.model_dump(exclude_none=True)
        return {**plain, "role": "system"} if self.role == "developer" else plain

    @property
    def text(self) -> str:
        """All of its text."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class StreamOptions(_Strict):
    """What streams have besides tokens."""

    include_usage: bool = False


class RequestBody(_Strict):
    """What both ways of asking have in common. `max_tokens` None means as many as fit.

    `cache_salt` is vLLM's: requests with different ones share no cached KV, so that the time of an answer tells nobody
    whether others have asked the same. So are `return_token_ids` and `return_tokens_as_token_ids`, by which logprobs
    name tokens as `token_id:5`.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]]
    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]

    model: str | None = None  # the one that is served
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=_MAX_INT)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP), BeforeValidator(_listed)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    cache_salt: str = Field("", max_length=256)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside each generated one with its logprob; None for neither."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """True when the last event of a stream should tell the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_possible_tokens: int) -> SamplingParams:
        """How to sample; a seed is drawn if there is none. At most `max_possible_tokens` tokens: those that fit."""
        asked = self.max_completion_tokens or self.max_tokens or self.default_max_tokens or max_possible_tokens
        return SamplingParams(
            max_tokens=min(asked, max_possible_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            seed=secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
        )


class ChatBody(RequestBody):
    """The body of `/v1/chat/completions`."""

    unsupported = unsupported.CHAT
    prompt_field = "messages"
    default_max_tokens = None

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """See RequestBody."""
        return self.top_logprobs if self.logprobs else None


class CompletionBody(RequestBody):
    """The body of `/v1/completions`."""

    unsupported = unsupported.COMPLETION
    prompt_field = "prompt"
    default_max_tokens = 16

    prompt: Prompt
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(_unless_false)] = None

    @property
    def num_logprobs(self) -> int | None:
        """See RequestBody."""
        return self.logprobs


B = TypeVar("B", bound=RequestBody)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[B]):
    """A valid body, and how many of its fields nobody knows."""

    body: B
    num_ignored: int


def parse(kind: type[B], raw: bytes) -> Parsed[B]:
    """Reads and checks a body.

    Raises:
        InvalidRequest: not JSON, not UTF-8, a field that is missing, wrong or not supported yet; `param` names it.
    """
    given = _json_object(raw)
    num_ignored = unsupported.count_unknown(given, kind.model_fields, kind.unsupported)
    unsupported.refuse(given, kind.unsupported)
    num_ignored += _look_into(given)
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False)[0]) from error
    _check_together(body)
    return Parsed(body, num_ignored)


def _json_object(raw: bytes) -> dict[str, Any]:
    """Fields that are null count as left out: clients send them for what they do not set."""
    try:
        given = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON in UTF-8: {error}.") from error
    if not isinstance(given, dict):
        raise InvalidRequest(f"The body is a JSON {type(given).__name__}; send an object.")
    return _without_nulls(given)


def _without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _look_into(given: dict[str, Any]) -> int:
    """Nested fields: those not supported are refused. Returns how many nobody knows."""
    num_unknown = 0
    if isinstance(options := given.get("stream_options"), dict):
        unsupported.refuse(options, unsupported.STREAM_OPTIONS, "stream_options.")
        num_unknown += unsupported.count_unknown(options, StreamOptions.model_fields, unsupported.STREAM_OPTIONS)
    if isinstance(messages := given.get("messages"), list) and len(messages) <= MAX_MESSAGES:
        given["messages"] = [_without_nulls(each) if isinstance(each, dict) else each for each in messages]
        for index, message in enumerate(given["messages"]):
            num_unknown += _look_into_message(message, f"messages.{index}.")
    return num_unknown


def _look_into_message(message: object, prefix: str) -> int:
    if not isinstance(message, dict):
        return 0
    unsupported.refuse(message, unsupported.MESSAGE, prefix)
    return unsupported.count_unknown(message, ChatMessage.model_fields, unsupported.MESSAGE)


def _check_together(body: RequestBody) -> None:
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs is for logprobs; set logprobs to true too.", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is for streams only; set stream too.", param="stream_options")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequest(
            f"max_tokens is {both[0]} and max_completion_tokens is {both[1]}; set one of them.",
            param="max_completion_tokens",
        )


def _invalid(detail: ErrorDetails) -> InvalidRequest:
    param = ".".join(str(part) for part in detail["loc"] if not str(part).startswith(_TAG))
    if detail["type"] == "missing":
        return InvalidRequest(f"{param} is missing; it is required.", param=param)
    message = detail["msg"].removeprefix("Value error, ").rstrip(".")
    if should := _SHOULD.fullmatch(message):
        return InvalidRequest(f"{param} must {should[1]}, not {_shown(detail['input'])}.", param=param)
    return InvalidRequest(f"{param}: {message}.", param=param)


def _shown(value: object) -> str:
    """A value in an error, short enough to read."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
