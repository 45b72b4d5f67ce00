"""Renders chats with the model's own jinja template, as transformers does, in a sandbox and within limits."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.errors import InvalidRequest, ModelError
from kvrelay.gateway.chat_marks import ChatMarks, check_input
from kvrelay.gateway.segments import Segment
from kvrelay.gateway.tokenizer import Tokenizer

_MAX_LOOP_STEPS = 200_000
_MAX_CHARACTERS = 2**26
_COUNT_STEP = "count_loop_step"
# What a template's expressions can raise: its own errors, and Python's for operations that do not fit the values.
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)
_PROBES = (
    [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")],
    [{"role": role, "content": "a"} for role in ("user", "assistant", "user")],
)


class ChatTemplate:
    """Turns messages into the segments of a prompt.

    Special tokens come only from the template: those a user typed are text, wherever the template puts them and
    whatever it does to them. Two limits follow. A template that compares a message with a special token
    (`'<|im_end|>' in content`) never finds it there. A template that assembles special tokens of pieces is recognised
    by rendering plain conversations when it is loaded; what it assembles in other cases only, say for tools, is text,
    and in such a template a message compared with what special tokens begin or end with (`'<' in content`) is unequal.
    """

    def __init__(self, source: str | None, special_tokens: Iterable[str], named_tokens: Mapping[str, str]) -> None:
        """Compiles a template; None stands for a model without one. Raises ModelError if it is not valid jinja."""
        self._marks = ChatMarks(frozenset(special_tokens))
        self._named = {name: self._marks.mark(token) for name, token in named_tokens.items()}
        self._template = None if source is None else _compile(source, self._marks)
        self._assembled = False
        self._assembled = any(map(self._leaves_special, _PROBES))

    @classmethod
    def load(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template that came with a tokenizer. Raises ModelError if it is not valid jinja."""
        return cls(tokenizer.chat_template, tokenizer.special_tokens, tokenizer.named_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Renders messages for `Tokenizer.encode_segments`. Text parts of a message's content are joined by newlines.

        Raises InvalidRequest if the model has no template, or if the template refuses the messages or fails on them.
        """
        if self._template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions instead.", param="messages")
        variables = {
            **(template_kwargs or {}),
            "messages": [_plain_message(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        check_input(variables)
        if self._assembled:
            variables = self._marks.guard(variables)
        rendered = _render(self._template, {**variables, **self._named})
        return self._marks.split(rendered, assembled=self._assembled)

    def _leaves_special(self, messages: list[dict[str, str]]) -> bool:
        if self._template is None:
            return False
        try:
            segments = self.render(messages)
        except InvalidRequest:
            return False  # the template does not take such a conversation, which is its right
        return any(segment.text != self._marks.mark(segment.text) for segment in segments if not segment.special)


class _StepCounter:
    """Ends templates that loop on and on. One per rendering."""

    def __init__(self) -> None:
        self._left = _MAX_LOOP_STEPS

    def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TemplateError(f"it took more than {_MAX_LOOP_STEPS:,} loop steps")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, marks: ChatMarks) -> Template:
    environment = _environment()
    try:
        tree = environment.parse(source)
        for literal in tree.find_all(nodes.TemplateData):
            literal.data = marks.mark(literal.data)
        for constant in tree.find_all(nodes.Const):
            constant.value = marks.mark(constant.value) if isinstance(constant.value, str) else constant.value
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, _call(_COUNT_STEP))
        code = environment.compile(tree)
    except TemplateSyntaxError as error:
        raise ModelError(f"The model's chat template is not valid jinja (line {error.lineno}: {error}).") from error
    return Template.from_code(environment, code, environment.make_globals(None))


def _call(name: str) -> nodes.ExprStmt:
    return nodes.ExprStmt(nodes.Call(nodes.Name(name, "load"), [], [], None, None))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which models never saw in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _render(template: Template, variables: Mapping[str, Any]) -> str:
    try:
        return _join(template.generate({**variables, _COUNT_STEP: _StepCounter()}))
    except _FAILURES as error:
        raise InvalidRequest(
            f"The model's chat template cannot render these messages: {error}. "
            "Check their roles, order and content, or use /v1/completions with a prompt.",
            param="messages",
        ) from error


def _join(pieces: Iterable[str]) -> str:
    joined, size = [], 0
    for piece in pieces:
        joined.append(piece)
        size += len(piece)
        if size > _MAX_CHARACTERS:
            raise TemplateError(f"it wrote more than {_MAX_CHARACTERS:,} characters")
    return "".join(joined)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    # Clients send null for what they do not set; templates expect such fields to be absent.
    plain = {name: value for name, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list):
        plain["content"] = "\n".join(map(_text_of_part, plain["content"]))
    return plain


def _text_of_part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise InvalidRequest(f"A message has content of type {kind!r}; this model reads text only.", param="messages")
