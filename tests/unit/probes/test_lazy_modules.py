"""What is asked of modules that are imported when somebody asks them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from dtobs.probes.settings import _sources


class Lazy(ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise ImportError(f"{name}: install what this module needs")


def test_a_lazy_module_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    main = ModuleType("__main__")
    main.__file__ = __file__
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    found = dict(_sources({"__main__": main, "lazy": sys.modules["lazy"], "none": None}))
    assert list(found) == ["__main__"]
