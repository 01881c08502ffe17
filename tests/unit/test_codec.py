"""What comes from a file or another machine becomes the declared values, or one kind of error."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtobs.codec import MAX_DEPTH, DecodeError, Natural, decode, encode, parse
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.nodes.peer import NodeHead, Question
from dtobs.recording.arrivals import Arrival
from dtobs.recording.capture import Capture, RankCapture
from dtobs.recording.contact import Contact
from dtobs.recording.journal import Entry
from dtobs.recording.meta import Construction, Group, Op, Parameter, Site
from dtobs.recording.plan import Plan

READ = [
    Arrival, Capture, Construction, Contact, Entry, Finding, Group, NodeHead, Op, Parameter, Plan, ProcessState,
    Question, RankCapture, Site,
]  # fmt: skip


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    count: Natural
    share: float = 0.0
    on: bool = False
    colour: Colour = Colour.RED
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, str] = (0, "")
    step: int | None = None
    inner: Inner | None = None
    by_rank: dict[int, Inner] = field(default_factory=dict)
    anything: Any = None
    small: Annotated[int, range(3)] = 0


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
inners = st.builds(Inner, st.text(), st.lists(st.integers(-(1 << 63), (1 << 63) - 1)).map(tuple))
outers = st.builds(
    Outer,
    st.integers(0, (1 << 63) - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.sampled_from(Colour),
    st.sampled_from("ab"),
    st.tuples(st.integers(0, 9), st.text()),
    st.none() | st.integers(0, 9),
    st.none() | inners,
    st.dictionaries(st.integers(-5, 10**6), inners, max_size=3),
    st.none() | st.lists(st.text()),
)


@given(made=outers)
def test_what_is_encoded_is_decoded(made: Outer) -> None:
    assert decode(Outer, parse(encode(made))) == made


@pytest.mark.parametrize("kind", READ)
@settings(max_examples=25)
@given(data=st.data())
def test_anything_is_the_declared_value_or_one_error(kind: type[Any], data: st.DataObject) -> None:
    fields = st.fixed_dictionaries({}, optional=dict.fromkeys(get_type_hints(kind), values))
    with contextlib.suppress(DecodeError):
        assert isinstance(decode(kind, data.draw(values | fields)), kind)


@given(text=st.binary(max_size=40) | st.text(max_size=40))
def test_any_text_is_a_value_or_one_error(text: bytes | str) -> None:
    with contextlib.suppress(DecodeError):
        parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"count":1,"count":2}', b"\xff\xfe\xfd", "\x00"],
)
def test_texts_that_are_refused(text: bytes | str) -> None:
    with pytest.raises(DecodeError):
        parse(text)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("{}", "no Outer: .*count"),
        ('{"count":-1}', "count: -1 is not in its bounds"),
        ('{"count":1.0}', "count: 1.0 is not int"),
        ('{"count":true}', "count: bool is not int"),
        ('{"count":"1"}', "count: '1' is not int"),
        (f'{{"count":{10**30}}}', "count: a huge number is not int"),
        ('{"count":1,"share":NaN}', "share: nan is not float"),
        ('{"count":1,"share":1e999}', "share: inf is not float"),
        (f'{{"count":1,"share":{10**400}}}', "share: no float"),
        ('{"count":1,"colour":"blue"}', "colour: no Colour: 'blue'"),
        ('{"count":1,"colour":[]}', "colour: no Colour"),
        ('{"count":1,"kind":[]}', "kind: list is not 'a' or 'b'"),
        ('{"count":1,"pair":[1]}', "pair: list is not 2 values"),
        ('{"count":1,"small":3}', "small: 3 is not in its bounds"),
        ('{"count":1,"by_rank":{"x":{}}}', "by_rank: 'x' is not a number"),
        ('{"count":1,"by_rank":{"٣":{}}}', "by_rank: '٣' is not a number"),
        ('{"count":1,"inner":{"name":"x","sizes":[null]}}', "inner: sizes: None is not int"),
        ('{"count":1,"inner":7}', "inner: 7 is not an object"),
        (f'{{"count":1,"anything":{"[" * (MAX_DEPTH + 1)}{"]" * (MAX_DEPTH + 1)}}}', "anything: nested too deeply"),
        ("[]", "list is not an object"),
    ],
)
def test_values_that_are_refused_say_where(fields: str, why: str) -> None:
    with pytest.raises(DecodeError, match=f"^{why}"):
        decode(Outer, parse(fields))


def test_fields_of_a_newer_version_are_passed_over() -> None:
    assert decode(Inner, {"name": "x", "later": [1]}) == Inner("x")


def test_numbers_of_numpy_are_numbers_and_the_rest_is_text() -> None:
    said = encode({"seed": np.int64(5), "share": np.float32(0.5), "kind": str, "inner": Inner("x", (1,))})
    assert json.loads(said) == {"seed": 5, "share": 0.5, "kind": "<class 'str'>", "inner": {"name": "x", "sizes": [1]}}
