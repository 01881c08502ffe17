"""Documents: the text of Python's own library, or of files the user names. Each is a name and a text.

Text files are read as UTF-8 and cut into pieces at line ends; `.jsonl` gives one document a line (its "text");
`.parquet` one a row (its "text" column). About one byte in twenty is held out for validation: whole files where there
are many of them, else pieces. Padding, chat templates and document masks are out of scope: samples
are packed windows of one long stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import DataError

_LARGEST_PIECE = 64 * 1024  # characters
_NOT_TEXT = {".pyc", ".so", ".a", ".o", ".bin", ".gz", ".zip", ".xz", ".png", ".jpg", ".pdf", ".pt", ".safetensors"}
_VALIDATION_SHARE = 20  # one in twenty is held out


@dataclass(frozen=True)
class Document:
    """One text, and on which side of the validation split it lies."""

    text: str
    held_out: bool


@dataclass(frozen=True)
class Corpus:
    """The files to read, in a fixed order, and a fingerprint that changes when they do."""

    title: str
    files: tuple[Path, ...]
    base: Path
    fingerprint: str

    def documents(self) -> Iterator[Document]:
        """Every document, in a fixed order. Raises DataError for a file that cannot be understood."""
        sizes = [path.stat().st_size for path in self.files]
        piece = max(256, min(_LARGEST_PIECE, sum(sizes) // 100))
        by_file = len(self.files) >= _VALIDATION_SHARE
        split = _Split()
        for path, size in zip(self.files, sizes, strict=True):
            file_held_out = by_file and split.hold_out(size)
            for text in _read(path, piece):
                yield Document(text, file_held_out if by_file else split.hold_out(len(text)))


class _Split:
    """Holds out as much as keeps the held-out part at one in twenty of what was seen; a pure function of the order."""

    def __init__(self) -> None:
        self._seen = self._held_out = 0

    def hold_out(self, size: int) -> bool:
        self._seen += size
        if (self._held_out + size) * _VALIDATION_SHARE > self._seen:
            return False
        self._held_out += size
        return True


def standard_library(limit_bytes: int) -> Corpus:
    """The running Python's own library: no download. Modules are taken in a mixed order up to `limit_bytes`."""
    base = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__", "pydoc_data", "encodings"}
    found = []
    for folder, below, names in os.walk(base):
        below[:] = [name for name in below if name not in skipped]  # site-packages may hold tens of thousands of files
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    found.sort(key=lambda path: hashlib.blake2b(path.relative_to(base).as_posix().encode()).digest())
    chosen, total = [], 0
    for path in found:
        size = path.stat().st_size
        if total + size <= limit_bytes:
            chosen.append(path)
            total += size
    if not chosen:
        raise DataError(f"found no Python modules below {base}; name a corpus with --data.path")
    return Corpus("Python's standard library", tuple(sorted(chosen)), base, _fingerprint(chosen, base))


def from_path(path: Path) -> Corpus:
    """The files at or below `path`."""
    if not path.exists():
        raise DataError(f"--data.path {path} does not exist")
    base = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if _looks_like_text(p, base))
    if not files:
        raise DataError(f"--data.path {path} holds no text files")
    if not any(file.stat().st_size for file in files):
        raise DataError(f"--data.path {path} is empty")
    return Corpus(path.name, tuple(files), base, _fingerprint(files, base))


def _looks_like_text(path: Path, base: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(base).parts)
    return path.is_file() and not hidden and path.suffix.lower() not in _NOT_TEXT and path.stat().st_size > 0


def _fingerprint(files: list[Path], base: Path) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(files):
        state = path.stat()
        digest.update(f"{path.relative_to(base).as_posix()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read(path: Path, piece: int) -> Iterator[str]:
    suffix = path.suffix.lower()
    try:
        if suffix == ".jsonl":
            yield from _read_jsonl(path)
        elif suffix == ".parquet":
            yield from _read_parquet(path)
        else:
            yield from _read_text(path, piece)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text{_place_of_bad_text(path)}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _place_of_bad_text(path: Path) -> str:
    """The first line that is not UTF-8; a decoder of a stream only knows its place in a buffer."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f" (line {number}, byte {error.start + 1} of it)"
    return ""


def _read_text(path: Path, piece: int) -> Iterator[str]:
    waiting: list[str] = []
    size = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if size and size + len(line) > piece:
                yield "".join(waiting)
                waiting, size = [], 0
            waiting.append(line)
            size += len(line)
    if waiting:
        yield "".join(waiting)


def _read_jsonl(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield _text_of(line, f"{path}, line {number}")


def _text_of(line: str, where: str) -> str:
    """The "text" of one line of JSON. Raises DataError."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{where}: not JSON ({reason}); .jsonl is one JSON object a line") from error
    if not isinstance(value, dict) or "text" not in value:
        what = f"an object with {_names(value)}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise DataError(f'{where}: expected a JSON object with "text", found {what}')
    text = value["text"]
    if not isinstance(text, str):
        raise DataError(f'{where}: "text" is {type(text).__name__}, not a string')
    return text


def _names(names: Iterable[str]) -> str:
    """A few names for an error's line."""
    listed = list(names)
    return ", ".join(map(repr, listed[:5])) + (", ..." if len(listed) > 5 else "") if listed else "nothing"


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow: pip install 'dtobs[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if "text" not in schema.names:
                raise DataError(f'{path} has no column "text"; it has {_names(schema.names)}')
            kind = schema.field("text").type
            for rows in file.iter_batches(columns=["text"]):
                for text in rows.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        raise DataError(f'the column "text" of {path} is {kind}, not text')
                    yield text or ""
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not a Parquet file that can be read: {reason}") from error
