"""Texts of a recording made fit to be shown: they may hold anything, terminal commands and broken Unicode included."""

from __future__ import annotations

import re

_UNFIT = re.compile("[\x00-\x09\x0b-\x1a\x1c-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_FOREIGN_ESCAPE = re.compile(r"\x1b(?!\[(?:0|1|2|1;3[123])m)")
_REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    """`text` without what a terminal or a browser would obey; line ends and our own colours stay."""
    return _FOREIGN_ESCAPE.sub(_REPLACEMENT, _UNFIT.sub(_REPLACEMENT, text))
