"""Messages of every kind, drawn from their types: what the union gains is drawn from then on."""

import typing
from collections.abc import Iterable
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvrelay.messages import AnyMessage, Message

KINDS: tuple[type[Message], ...] = typing.get_args(typing.get_args(AnyMessage)[0])
MOST = 6  # items of a list, letters of a text: more finds nothing else


def messages() -> st.SearchStrategy[Message]:
    """Any message that its type allows."""
    return st.one_of([_models(kind) for kind in KINDS])


def _models(model: type[Any]) -> st.SearchStrategy[Any]:
    fields: dict[str, FieldInfo] = model.model_fields
    return st.builds(model, **{name: _values(field.annotation, field.metadata) for name, field in fields.items()})


def _values(kind: Any, limits: Iterable[object] = ()) -> st.SearchStrategy[Any]:
    """`limits` are those of annotated_types; others are ignored."""
    origin, arguments, found = typing.get_origin(kind), typing.get_args(kind), list[Any](limits)
    if origin is Annotated:
        inner = [each.metadata if isinstance(each, FieldInfo) else [each] for each in arguments[1:]]
        return _values(arguments[0], [*found, *(limit for listed in inner for limit in listed)])
    if origin in (Union, UnionType):
        return st.one_of([_values(each) for each in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        least, most = _sizes(found)
        return st.lists(_values(arguments[0]), min_size=least, max_size=most).map(tuple)
    if origin is dict:
        least, most = _sizes(found)
        return st.dictionaries(_values(arguments[0]), _values(arguments[1]), min_size=least, max_size=most)
    return _plain(kind, found)


def _plain(kind: type[Any], limits: list[Any]) -> st.SearchStrategy[Any]:
    if issubclass(kind, BaseModel):
        return _models(kind)
    if issubclass(kind, tuple):  # a named one
        return st.builds(kind, *map(_values, typing.get_type_hints(kind, include_extras=True).values()))
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    if kind is int:
        return st.integers(*_range(limits))
    if kind is float:
        low, high = _range(limits)
        open_end = any(isinstance(limit, Gt) for limit in limits)
        return st.floats(low, high, exclude_min=open_end, allow_nan=False, allow_infinity=False)
    least, most = _sizes(limits)
    return {bool: st.booleans(), NoneType: st.none(), str: st.text(min_size=least, max_size=most)}[kind]


def _range(limits: list[Any]) -> tuple[Any, Any]:
    """The lowest and the highest number, None without one: integers end below `Lt`, floats begin behind `Gt`."""
    lows = [limit.ge if isinstance(limit, Ge) else limit.gt for limit in limits if isinstance(limit, Ge | Gt)]
    highs = [limit.le if type(limit) is Le else limit.lt - 1 for limit in limits if type(limit) in (Le, Lt)]
    return next(iter(lows), None), next(iter(highs), None)


def _sizes(limits: list[Any]) -> tuple[int, int]:
    """The least and the most items or letters."""
    least = max((limit.min_length for limit in limits if isinstance(limit, MinLen)), default=0)
    most = min((limit.max_length for limit in limits if isinstance(limit, MaxLen)), default=MOST)
    return least, min(most, MOST)
