"""The table of contents of a checkpoint is read as every Python pickles it, and runs nothing."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path, PosixPath
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from runtime.errors import CheckpointError
from runtime.reader import MetadataReader


class Attribute:
    """Pickled as ``getattr(owner, name)``."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def read(folder: Path, found: object) -> Metadata:
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=found)))
    return MetadataReader(folder).read_metadata()


def test_a_member_of_an_enumeration_as_python_3_11_2_pickles_it(tmp_path: Path) -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read(tmp_path, Attribute(_MEM_FORMAT_ENCODING, member.name)).planner_data is member
    assert read(tmp_path, member).planner_data is member


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])  # the second is that of 3.13 alone
def test_a_path_as_each_python_pickles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, sys.modules[PosixPath.__module__])
    monkeypatch.setattr(PosixPath, "__module__", module)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=PosixPath("weights"))))
    monkeypatch.undo()
    assert MetadataReader(tmp_path).read_metadata().planner_data == PosixPath("weights")


@pytest.mark.parametrize("found", [Attribute(PosixPath, "touch"), Attribute(_MEM_FORMAT_ENCODING, "__class__")])
def test_no_other_attribute_is_given(tmp_path: Path, found: Attribute) -> None:
    with pytest.raises(CheckpointError, match="is no table of contents: it asks for the attribute"):
        read(tmp_path, found)
