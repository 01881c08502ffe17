"""Changes to good input: of bytes, and of JSON values node by node, so that what is behind a parser is reached too."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

_NUMBERS = (0, 1, -1, 7, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**40)
_STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    *_NUMBERS,
    0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "0",
    "x" * 300,
    "<script>",
    "\x00\x1b[31m\ud800",
    "../../etc/passwd",
    [],
    [[]],
    {},
    {"": None},
    [0] * 40,
)
_BYTES = (b"\x00", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\n", b'"', b"[", b"{", b"\x80")


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """`data` with one to four places changed."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(changed))
        length = random.choice((1, 1, 2, 4, 8, 32))
        match random.randrange(6):
            case 0 if changed:
                at = random.randrange(len(changed))
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                changed[at : at + 1] = random.randbytes(1)
            case 2:
                value = random.choice(_BYTES)
                changed[at : at + len(value)] = value
            case 3:
                del changed[at : at + length]
            case 4:
                changed[at:at] = changed[max(0, at - length) : at]
            case _:
                changed[at:at] = random.choice(_BYTES)
    if random.random() < 0.05:
        del changed[random.randint(0, len(changed)) :]
    return bytes(changed)


def mutate_value(value: Any, random: Random) -> Any:
    """A JSON value like `value` with one to three of its nodes replaced, doubled or taken out."""
    value = json.loads(json.dumps(value))
    for _ in range(random.randint(1, 3)):
        value = _change(value, random)
    return value


def _change(value: Any, random: Random) -> Any:
    if not isinstance(value, dict | list) or not value or random.random() < 0.02:
        return _replacement(value, random)
    key = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
    inner = value[key]
    if isinstance(inner, dict | list) and inner and random.random() < 0.85:
        value[key] = _change(inner, random)
        return value
    match random.randrange(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, list):
            value.insert(key, inner)
        case 1:
            value[random.choice(list(value))] = inner
        case _:
            value[key] = _replacement(inner, random)
    return value


def _replacement(value: Any, random: Random) -> Any:
    if type(value) is int and random.random() < 0.5:
        return value + random.choice((-1, 1, 2, 1000, -(2**40)))
    return deepcopy(random.choice(_STRANGE))  # what is changed further must not change the next input


def json_mutator(data: bytes, random: Random) -> bytes:
    """Mutate the JSON text `data` as a value, or as bytes where it is none."""
    return _structured(data, random, json.loads, lambda value: json.dumps(value).encode())


def jsonl_mutator(data: bytes, random: Random) -> bytes:
    """Mutate one line of JSON lines as a value; sometimes double, drop or move it."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    match random.randrange(6):
        case 0:
            lines.insert(random.randrange(len(lines)), lines[at])
        case 1:
            del lines[at]
        case _:
            lines[at] = json_mutator(lines[at], random)
    return b"\n".join(lines)


def _structured(data: bytes, random: Random, parse: Callable[[bytes], Any], write: Callable[[Any], bytes]) -> bytes:
    if random.random() < 0.75:
        try:
            return write(mutate_value(parse(data), random))
        except (ValueError, RecursionError):
            pass
    return mutate_bytes(data, random)
