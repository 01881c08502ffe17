"""Reads a checkpoint's table of contents without running what is in it.

torch keeps the table (`.metadata`) as a pickle, which can run any code when it is loaded. Tables name a dozen harmless
classes; this reader refuses every other one. The tensors themselves torch loads with `weights_only`.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from runtime.errors import CheckpointError

_CLASSES = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it, and no other
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 pickles the member of an enumeration as an attribute of it
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no table of contents needs")
        return super().find_class(module, name)


def _member(kind: object, name: object) -> Enum:
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[str(name)]
    raise pickle.UnpicklingError(f"it asks for the attribute {name!r}, which no table of contents needs")


class MetadataReader(FileSystemReader):
    """torch's reader of a checkpoint folder, with a table of contents that cannot run code."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The table of contents. Raises CheckpointError where it cannot be read or is no such table."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                found = _TableUnpickler(file).load()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:  # rubbish raises almost anything while it is unpickled
            raise CheckpointError(f"{path} is no table of contents: {error}") from error
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{path} is no table of contents")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
