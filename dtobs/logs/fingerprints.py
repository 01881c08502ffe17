"""Torch's comparison of the calls of two ranks (TORCH_DISTRIBUTED_DEBUG=DETAIL), each written as a fingerprint.

``SequenceNumber=3104, OpType=ALLREDUCE, TensorShape=[20, 10], TensorDtypes=Float, …``; older releases count no calls.
"""

from __future__ import annotations

import re

from dtobs.logs.evidence import Sign

_DIFFERS = re.compile(r"Tensor (?:Tensor )?(?:shapes|dtypes|device)|Op type|Tensor dtypes: ")


def code_of(sign: Sign) -> str:
    """Which finding it is that two ranks were in these calls."""
    mine, theirs = (operation(sign.fields.get(name, "")) for name in ("mine", "theirs"))
    if mine == theirs and "Sequence number" in sign.text and not _DIFFERS.search(sign.text):
        return "call-site-mismatch"
    if mine == theirs:
        return "dtype-mismatch" if "Tensor dtypes" in sign.text and "shapes" not in sign.text else "shape-mismatch"
    return "collective-mismatch"


def operation(fingerprint: str) -> str:
    """``ALLREDUCE``."""
    return fingerprint.partition("OpType=")[2].partition(",")[0].strip(")")


def shape(fingerprint: str) -> str:
    """``[20, 10``; "" where there is none."""
    return fingerprint.partition("TensorShape=")[2].partition("]")[0]


def call_text(fingerprint: str) -> str:
    """``ALLREDUCE of shape [20, 10] in Float (#3104)``, with what the fingerprint has."""
    sizes, dtype = shape(fingerprint), fingerprint.partition("TensorDtypes=")[2].partition(",")[0].strip(")")
    told = "" if is_unfilled(fingerprint) else fingerprint
    number = re.match(r"SequenceNumber=(\d{1,12})(?:, )?(?=OpType)", told)
    text = operation(fingerprint) or "something"
    text += f" of shape {sizes}]" if sizes else ""
    return text + (f" in {dtype}" if dtype else "") + (f" (#{number[1]})" if number else "")


def is_unfilled(fingerprint: str) -> bool:
    """Whether torch had no more of a call than its name, which it may have made up; barriers have no more."""
    return "TensorShape=" not in fingerprint and "BARRIER" not in fingerprint
