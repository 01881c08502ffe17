"""JSON that came from a file or a machine, as the values that a class declares; whatever else it holds is one error.

::

    contact = decode(Contact, parse(text))

`decode` knows bool, int, float, str, None, Any, Literal, enums, unions, tuples, lists, dictionaries and dataclasses.
Integers fit into 64 bits unless ``Annotated[int, range(...)]`` says otherwise, floats are finite, what is declared as
Any is nested no deeper than `MAX_DEPTH`. Keys that a dataclass does not have are passed over, so that a newer version
may add some; ``Annotated[X, check]`` asks ``check(value)`` as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import numpy as np

MAX_DEPTH = 64
_INT64 = range(-(1 << 63), 1 << 63)
Natural = Annotated[int, range(1 << 63)]
T = TypeVar("T")
_Decoder = Callable[[Any], Any]


class DecodeError(ValueError):
    """The text is no JSON, or its value is not of the type that is asked for."""


def parse(text: bytes | str) -> Any:
    """The value of a JSON text. Raises DecodeError when it is none, or an object in it has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError, MemoryError) as error:
        raise error if isinstance(error, DecodeError) else DecodeError(f"not JSON: {error}") from error


def encode(value: Any, **options: Any) -> str:
    """`value` as JSON on one line, dataclasses and numpy's numbers included; anything else as its text."""
    options.setdefault("separators", (",", ":"))
    return json.dumps(value, default=_plain, **options)


def finite(value: Any, depth: int = 0) -> Any:
    """A JSON value without NaN and infinity, which JSON does not have, and of bounded depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict | list | tuple) and depth > MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {str(key): finite(given, depth + 1) for key, given in value.items()}
    if isinstance(value, list | tuple):
        return [finite(given, depth + 1) for given in value]
    return value


@overload
def decode(kind: type[T], value: Any) -> T: ...
@overload
def decode(kind: Any, value: Any) -> Any: ...
def decode(kind: Any, value: Any) -> Any:
    """`value`, as `parse` gives it, as a `kind`. Raises DecodeError."""
    try:
        return _decoder(kind)(value)
    except RecursionError as error:
        raise DecodeError("nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DecodeError("a key stands twice in one object")
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return value.item() if isinstance(value, np.generic) else str(value)


@cache
def _decoder(kind: Any) -> _Decoder:
    """What turns a value into a `kind`; made once for each."""
    origin, given = get_origin(kind), get_args(kind)
    if kind is Any:
        return _anything
    if origin is Annotated:
        return partial(_checked, _decoder(given[0]), given[1])
    if origin is Literal:
        return partial(_one_of, given)
    if origin in (Union, types.UnionType):
        return partial(_first_of, [_decoder(k) for k in sorted(given, key=lambda k: k is not type(None))])
    if origin is tuple and given[-1:] != (Ellipsis,):
        return partial(_fixed, [_decoder(k) for k in given])
    if origin in (tuple, list):
        return partial(_items, origin, _decoder(given[0]))
    if origin is dict:
        return partial(_table, given[0] is int, _decoder(given[1]))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return partial(_fields, kind, {f.name: _decoder(hints[f.name]) for f in dataclasses.fields(kind) if f.init})
    return partial(_member if issubclass(kind, Enum) else _scalar, kind)


def _scalar(kind: type, value: Any) -> Any:
    if kind is float and type(value) in (int, float) and abs(value) < math.inf:
        return _made(float, value)
    if type(value) is not kind or kind is float or (kind is int and value not in _INT64):
        raise _refused(value, kind.__name__)
    return value


def _member(kind: type, value: Any) -> Any:
    return _made(kind, value if isinstance(value, str | int) else None)


def _checked(decoder: _Decoder, check: Any, value: Any) -> Any:
    made = decoder(value)
    if not (made in check if isinstance(check, range) else check(made)):
        raise _refused(value, "in its bounds")
    return made


def _one_of(choices: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, str | int) or value not in choices:
        raise _refused(value, " or ".join(map(repr, choices)))
    return value


def _first_of(decoders: list[_Decoder], value: Any) -> Any:
    for decoder in decoders[:-1]:
        try:
            return decoder(value)
        except DecodeError:
            continue
    return decoders[-1](value)


def _fixed(decoders: list[_Decoder], value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != len(decoders):
        raise _refused(value, f"{len(decoders)} values")
    return tuple(decoder(item) for decoder, item in zip(decoders, value, strict=True))


def _items(kind: Callable[[Any], Any], decoder: _Decoder, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _refused(value, "a list")
    return kind(map(decoder, value))


def _table(numbered: bool, decoder: _Decoder, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _refused(value, "an object")
    return {_number(key) if numbered else key: decoder(item) for key, item in value.items()}


def _number(key: str) -> int:
    """The number that a JSON object has for a key."""
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 18:
        raise _refused(key, "a number")
    return int(key)


def _fields(kind: type, decoders: dict[str, _Decoder], value: Any) -> Any:
    if not isinstance(value, dict):
        raise _refused(value, "an object")
    found = {}
    for name in decoders.keys() & value.keys():
        try:
            found[name] = decoders[name](value[name])
        except DecodeError as error:
            raise DecodeError(f"{name}: {error}") from None
    return _made(kind, **found)


def _made(kind: Any, /, *given: Any, **fields: Any) -> Any:
    """A value of `kind`; it refuses what lacks a field, or is none of its members."""
    try:
        return kind(*given, **fields)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise DecodeError(f"no {kind.__name__}: {str(error)[:200]}") from error


def _anything(value: Any, depth: int = MAX_DEPTH) -> Any:
    if isinstance(value, dict | list):
        if not depth:
            raise DecodeError("nested too deeply")
        for item in value.values() if isinstance(value, dict) else value:
            _anything(item, depth - 1)
    return value


def _refused(value: Any, wanted: str) -> DecodeError:
    """What stands there instead, in a few words, however large it is."""
    shown = repr(value)[:60] if isinstance(value, str | float | None) else type(value).__name__
    if isinstance(value, int) and not isinstance(value, bool):
        shown = str(value) if value in range(-(10**24), 10**24) else "a huge number"
    return DecodeError(f"{shown} is not {wanted}")
