"""Checkpoints that are not what was saved, or that the model does not take.

Of files it is seen what torch.load or safetensors cannot read whole, and what has rotted.

``torch.save`` writes a checksum of each record into its zip file, and ``torch.load`` reads the records without looking
at it (2.13): a changed bit is loaded without a word. So after a load some records are read again, for as long as half
of the load has taken, each rank beginning at another one. A file is not what was saved only where records are right and
others are not: without checksums (`torch.serialization.set_crc32_options(False)`) they are 0, and nothing is said.

``load_state_dict(…, strict=False)`` returns what it did not take, and few look at it: names with another prefix, such
as DDP's ``module.``, are left out, and the model keeps its random values. What a module has taken nothing of, or what
it would have taken most of with another prefix, is written down with the first step, if nothing was loaded since.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
import zipfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtobs.probes.base import Probe
from dtobs.probes.call_site import CallSites

_MAX_MESSAGE, _MAX_PATH = 200, 1000
_MOST = 16
_CHUNK_BYTES = 1 << 20
_LEAST_SECONDS, _SHARE = 0.05, 0.5
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80\x02"
_CUT_ZIP = ("failed finding central directory", "file read failed")
_CUT_PICKLE = ("unexpected EOF", "storage has wrong byte size", "Ran out of input", "pickle data was truncated")
_SAFETENSORS = "safetensors.torch"
_CUT_SAFETENSORS = ("not fully covered", "header too small", "invalid JSON in header")


class Loads(Probe):
    """Writes down each file that was loaded, or could not be, and is not whole."""

    name = "loads"
    about_model = False

    def install(self) -> None:
        self._sites = CallSites(self.context.recorder.meta)
        self._told: set[str] = set()
        self._watch(torch, "load")
        if _SAFETENSORS in sys.modules:
            self._watch(sys.modules[_SAFETENSORS], "load_file")
        self._left = _MOST
        self._unloaded: list[tuple[weakref.ref[nn.Module], dict[str, Any]]] = []
        self.around(nn.Module, "load_state_dict", self._before_taking, lambda handle: handle.remove())

    def step_begin(self) -> None:
        """The step begins with what was loaded until now; a loop may load in each."""
        told, self._unloaded = self._unloaded[: self._left], []
        self._left -= len(told)
        for _, said in told:
            self.context.recorder.meta.add("unloaded", **said, step=self.context.step)

    def _before_taking(self, module: Any, state_dict: Any = None, strict: Any = True, *_args: Any, **_: Any) -> Any:
        if not isinstance(state_dict, Mapping) or not state_dict:
            return None
        site = -1 if strict else self._sites.here(2)
        taking = self.guard(partial(self._taken, list(state_dict), site))
        return module.register_load_state_dict_post_hook(taking)

    def _taken(self, names: list[str], site: int, module: nn.Module, left: Any) -> None:
        """A module has taken of `names` what it did; `site` is -1 where it raises for the others."""
        unexpected, missing = set(map(str, left.unexpected_keys)), set(map(str, left.missing_keys))
        taken = len(names) - len(unexpected)
        if taken or not missing:  # by a part as well: the rest may be loaded in other ways
            earlier = [known for known, _ in self._unloaded if (m := known()) is not None and module in m.modules()]
            self._unloaded = [each for each in self._unloaded if each[0] not in earlier]
        prefix = _prefix(unexpected, missing)
        if site >= 0 and missing and unexpected and (taken <= 0 or prefix):
            said = {"given": len(names), "taken": max(0, taken), "missing": len(missing), "prefix": prefix}
            name = min(unexpected)[:_MAX_MESSAGE]
            self._unloaded.append((weakref.ref(module), {"site": site, "name": name, **said}))

    def _watch(self, owner: Any, name: str) -> None:
        def begin(*args: Any, **named: Any) -> tuple[Path, int, float, BaseException | None] | None:
            file = next((given for given in (*args[:1], named.get("f"), named.get("filename")) if given), None)
            if not isinstance(file, (str, os.PathLike)) or named.get("mmap"):
                return None
            return Path(os.fspath(file)), self._sites.here(2), time.monotonic(), sys.exception()

        self.around(owner, name, begin, self._end)

    def _end(self, began: tuple[Path, int, float, BaseException | None]) -> None:
        path, site, since, before = began
        error = sys.exception()
        try:
            if error is not None and error is not before:
                why = _cut(path, error)
            else:
                spent = _LEAST_SECONDS + _SHARE * (time.monotonic() - since)
                context = self.context
                why = rotten(path, context.rank / max(1, context.world_size), time.monotonic() + spent)
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):
            return  # it is gone, or no file that can be read again
        if why:
            self._say(str(path), why, site, loaded=error is None or error is before)

    def tell(self, path: str, why: str) -> None:
        """The loop has found for itself that a checkpoint is not what was saved, and does not load it."""
        self._say(path, why, self._sites.here(3), loaded=False)

    def _say(self, path: str, why: str, site: int, *, loaded: bool) -> None:
        if len(self._told) < _MOST and path not in self._told:
            self._told.add(path)
            said = {"path": path[:_MAX_PATH], "why": why[:_MAX_MESSAGE], "site": site, "loaded": loaded}
            self.context.recorder.meta.add("corrupt", **said, step=self.context.step, t_ns=time.monotonic_ns())


def _prefix(given: set[str], wanted: set[str]) -> str:
    """With a minus what the names `given` begin with beyond those `wanted`, with a plus what they lack; "" for neither.

    Only where it holds for two names or more, and for half of those wanted.
    """
    found: Counter[str] = Counter()
    for sign, longer, shorter in (("-", given, wanted), ("+", wanted, given)):
        for name in longer:
            parts = name.split(".")
            for at in range(1, len(parts)):
                if ".".join(parts[at:]) in shorter:
                    found[sign + ".".join(parts[:at]) + "."] += 1
    prefix, times = found.most_common(1)[0] if found else ("", 0)
    return prefix[:_MAX_MESSAGE] if times >= max(2, len(wanted) / 2) else ""


def _cut(path: Path, error: BaseException) -> str:
    """What a failed load says of a file that begins as one that was saved; "" where it says nothing of the file."""
    with path.open("rb") as file:
        head = file.read(4)
    if not head:
        return "it is empty"
    words: tuple[str, ...] = _CUT_ZIP if head == _ZIP else _CUT_PICKLE if head[:2] == _PICKLE else ()
    if path.suffix == ".safetensors":
        words = _CUT_SAFETENSORS
    text = " ".join(str(error).split())
    cut = any(each in text for each in words) or (bool(words) and isinstance(error, EOFError))
    return (text or "it ends too early") if cut else ""


def rotten(path: Path, begin: float, until: float) -> str:
    """The first record of a zip file that is not what its checksum says, where others are; "" where none is.

    Records are read in turn, the first one at the share `begin` (0 to 1) of them, until the moment `until`
    (``time.monotonic``). Raises OSError, BadZipFile, and what `zipfile` raises of files that are none of torch's.
    """
    with path.open("rb") as file:
        if file.read(4) != _ZIP:
            return ""
    right, wrong = 0, ""
    with zipfile.ZipFile(path) as archive:
        records = [info for info in archive.infolist() if info.compress_type == zipfile.ZIP_STORED and info.CRC]
        first = int(begin * len(records))
        for info in (*records[first:], *records[:first]):
            try:
                with archive.open(info) as record:
                    while record.read(_CHUNK_BYTES):
                        if time.monotonic() > until:
                            return wrong if right else ""
                right += 1
            except zipfile.BadZipFile:
                wrong = wrong or f"its record {info.filename} is not what its checksum says"
    return wrong if right else ""
