"""Turns a command line into a settings object, and a settings class into its help text."""

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import SettingsError

from kvrelay.config import Metavar, Settings
from kvrelay.errors import StartError

_PREFIX = "KVRELAY_"
_TYPE_NAMES = {int: "NUMBER", float: "NUMBER", str: "TEXT"}
_EXPECTED = {
    "int_parsing": "a whole number such as {}",
    "int_from_float": "a whole number such as {}",
    "float_parsing": "a number such as {}",
    "bool_parsing": "true or false",
}

S = TypeVar("S", bound=Settings)


def parse(settings_type: type[S], prog: str, args: Sequence[str]) -> S:
    """Fills the settings from the command line and, where it is silent, from the environment.

    Raises:
        StartError: an option that is unknown or malformed; the text names it and what is expected.
    """
    try:
        return settings_type(_cli_parse_args=list(args), _cli_prog_name=prog, _cli_exit_on_error=False)
    except ValidationError as error:
        sentences = [_invalid(settings_type, detail, args) for detail in error.errors(include_url=False)]
        raise StartError(f"{' '.join(sentences)} See `{prog} --help`.") from error
    except SettingsError as error:
        raise StartError(f"{_unparsed(settings_type, str(error))} See `{prog} --help`.") from error


def refuse_unknown_variables(settings_types: Iterable[type[Settings]], environ: Mapping[str, str]) -> None:
    """Raises StartError if a `KVRELAY_*` variable is no option of any command: it would be dropped silently."""
    known = {variable(name) for each in settings_types for name in options(each)}
    for name in environ:
        if name.upper().startswith(_PREFIX) and name.upper() not in known:
            hint = did_you_mean(name.upper(), known)
            raise StartError(f"The environment variable {name} is no option of any command{hint}; correct or unset it.")


def help_text(settings_type: type[Settings], prog: str) -> str:
    """What `--help` prints: the purpose and every option with its value, meaning and default."""
    own = settings_type.__annotations__
    fields = sorted(settings_type.model_fields.items(), key=lambda item: item[0] not in own)
    rows = [_help_row(field.alias or name, field) for name, field in fields]
    width = max(len(left) for left, _ in rows)
    lines = [_columns(left, right, width) for left, right in rows]
    head = f"Usage: {prog} [OPTIONS]\n\n{_purpose(settings_type)}\n\nOptions, each also an environment variable "
    return f"{head}(--some-option is {_PREFIX}SOME_OPTION):\n" + "\n".join(lines) + "\n"


def options(settings_type: type[Settings]) -> dict[str, FieldInfo]:
    """The fields of a settings class by the name that users see, with underscores."""
    return {field.alias or name: field for name, field in settings_type.model_fields.items()}


def option(name: str) -> str:
    """The command line's spelling of an option."""
    return f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    """The environment's spelling of an option."""
    return f"{_PREFIX}{name.upper()}"


def summary(settings_type: type[Settings]) -> str:
    """The first line of what a command is for."""
    return _purpose(settings_type).splitlines()[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to add to a sentence about a name that nobody knows; empty if nothing is close."""
    close = difflib.get_close_matches(name.partition("=")[0], list(known), n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""


def _purpose(settings_type: type[Settings]) -> str:
    paragraphs = (settings_type.__doc__ or "").strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _help_row(name: str, field: FieldInfo) -> tuple[str, str]:
    named = [item.text for item in field.metadata if isinstance(item, Metavar)]
    metavar = "|".join(named or _metavars(field.annotation))
    default = _shown(field.default)
    spelling = f"{option(name)}, {option(f'no_{name}')}" if field.default is True else option(name)
    return f"{spelling} {metavar}".rstrip(), f"{field.description}{f' [{default}]' if default else ''}"


def _columns(left: str, right: str, width: int) -> str:
    terminal_width = max(shutil.get_terminal_size().columns, width + 40)
    first, *more = textwrap.wrap(right, terminal_width - width - 4)
    return "\n".join([f"  {left:<{width}}  {first}", *(" " * (width + 4) + line for line in more)])


def _metavars(annotation: Any) -> Iterator[str]:
    """The value's placeholder, from the annotation: a Metavar wins, choices are listed, None is not shown."""
    origin, args = get_origin(annotation), get_args(annotation)
    named = [item.text for item in args if isinstance(item, Metavar)]
    if named:
        yield named[0]
    elif origin is Literal:
        yield from map(_shown, args)
    elif origin is Annotated:
        yield from _metavars(args[0])
    elif args:
        yield from (text for arg in args for text in _metavars(arg))
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from map(_shown, annotation)
    elif annotation not in (bool, type(None)):
        yield _TYPE_NAMES.get(annotation, "PATH")


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value.value if isinstance(value, Enum) else value)


def _invalid(settings_type: type[Settings], detail: ErrorDetails, args: Sequence[str]) -> str:
    """One sentence about one value that did not validate, naming it as the user gave it."""
    message = re.sub(r"<\w+\.\w+: ('[^']*')>", r"\1", detail["msg"]).split(", unable to")[0]
    message = message.removeprefix("Value error, ").rstrip(".")
    if not detail["loc"]:
        return f"{message}."
    name = str(detail["loc"][0])
    where = _as_given(name, args)
    if detail["type"] in _EXPECTED:
        expected = _EXPECTED[detail["type"]].format(_example(settings_type, name))
        return f"{where} should be {expected}, not {detail['input']!r}."
    if message.startswith(("Input should ", "String should ")):
        return f"{where} {message.split(' ', 1)[1]}, not {detail['input']!r}."
    return f"{where}: {message}."


def _example(settings_type: type[Settings], name: str) -> object:
    """A value of the right kind: the default, if it is a number."""
    field = options(settings_type).get(name)
    return field.default if field is not None and isinstance(field.default, int | float) else 4


def _as_given(name: str, args: Sequence[str]) -> str:
    given = any(arg.partition("=")[0] == option(name) for arg in args)
    return option(name) if given else variable(name)


def _unparsed(settings_type: type[Settings], message: str) -> str:
    """One sentence about a command line that argparse did not understand."""
    message = message.removeprefix("error parsing CLI: ")
    if not message.startswith("unrecognized arguments: "):
        return f"{message.removeprefix('argument ').replace(': expected', ' expects', 1)}."
    unknown = message.removeprefix("unrecognized arguments: ").split()[0]
    if not unknown.startswith("-"):
        return f"Unexpected argument {unknown!r}: options start with --."
    return f"Unknown option {unknown}{did_you_mean(unknown, map(option, options(settings_type)))}."
