"""Token files: a prepared corpus on disk, memory-mapped for reading.

A tokens folder holds `training.bin` and `validation.bin` (little-endian uint16, or uint32 for vocabularies above
65,536), `tokenizer.json`, and `index.json` with their lengths and digest. It appears whole or not at all. Such a
folder is also what `--data.path` accepts as pre-tokenised data.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Tokenizer

from runtime.config import Config
from runtime.data import tokenization
from runtime.data.corpus import Corpus, Document, from_path, standard_library
from runtime.data.numbers import is_numbers, split
from runtime.errors import DataError
from runtime.world import World

FORMAT = "runtime.tokens/1"
Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class TokenFiles:
    """A prepared corpus: two memory-mapped streams of token numbers."""

    title: str
    training: Tokens
    validation: Tokens
    vocabulary: int
    digest: str
    folder: Path


def prepare(config: Config) -> TokenFiles:
    """The tokens that `config.data` asks for; built into the cache first where they are not there yet.

    Many processes may call this at once, of one job or of several: one builds under a file lock, the others wait.
    Raises DataError where the corpus cannot be used or is too small for one sample.
    """
    data = config.data
    path = Path(data.path).expanduser() if data.path else None
    if path is not None and (path / "index.json").is_file():
        files = open_folder(path)
    else:
        corpus = from_path(path) if path is not None else standard_library(data.corpus_bytes)
        numbers = path is not None and is_numbers(path)
        made = "numbers" if numbers else f"{config.model.vocabulary}|{_tokenizer_key(data.tokenizer)}"
        key = xxhash.xxh3_64_hexdigest(f"{FORMAT}|{corpus.fingerprint}|{made}".encode())
        folder = cache_folder(data.cache) / key
        with _lock(folder.with_suffix(".lock")):
            if not (folder / "index.json").is_file():
                if numbers:
                    write = functools.partial(split, corpus.files[0])
                else:
                    write = functools.partial(_tokenise, corpus, data.tokenizer, config.model.vocabulary)
                _build(folder, corpus.title, write)
        files = open_folder(folder)
    if files.vocabulary > config.model.vocabulary:
        raise DataError(
            f"the tokens of {files.title} go up to {files.vocabulary - 1} and --model.vocabulary is"
            f" {config.model.vocabulary}; it must be at least {files.vocabulary}"
        )
    if len(files.training) <= data.sequence:
        raise DataError(
            f"{files.title} has {len(files.training)} training tokens, too few for one sample of"
            f" --data.sequence {data.sequence}"
        )
    return files


def cache_folder(asked: str) -> Path:
    """Where prepared corpora are kept: `asked`, or the user's cache folder."""
    if asked:
        return Path(asked).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dtobs" / "corpora"


def open_folder(folder: Path) -> TokenFiles:
    """Open a tokens folder. Raises DataError where it is not one or a file is shorter than its index says."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise DataError(f"{folder} has tokens of format {index['format']!r}; this version reads {FORMAT!r}")
        kind = np.dtype(index["dtype"])
        streams = {}
        for name in ("training", "validation"):
            length = int(index[f"{name}_tokens"])
            if (folder / f"{name}.bin").stat().st_size != length * kind.itemsize:
                raise DataError(f"{folder}/{name}.bin is not as long as its index says; delete the folder to rebuild")
            streams[name] = (
                np.memmap(folder / f"{name}.bin", dtype=kind, mode="r", shape=(length,))
                if length
                else np.empty(0, dtype=kind)
            )
        return TokenFiles(
            index["title"], streams["training"], streams["validation"], index["vocabulary"], index["digest"], folder
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"cannot open the tokens folder {folder}: {error}") from error


def _tokenizer_key(path: str) -> str:
    if not path:
        return "trained"
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise DataError(f"--data.tokenizer {path} holds no tokenizer.json")
    return xxhash.xxh3_64_hexdigest(file.read_bytes())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise _not_writable(path.parent, error) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _not_writable(cache: Path, error: OSError) -> DataError:
    return DataError(f"cannot write the corpus cache {cache}: {error.strerror}; choose another with --data.cache")


def _build(folder: Path, title: str, write: Callable[[Path], dict[str, Any]]) -> None:
    """Make a tokens folder beside `folder`, then rename it into place. `write` makes the streams and says of them.

    Raises DataError where it cannot be written; nothing of it stays.
    """
    for left in folder.parent.glob(f"{folder.name}[!.]*"):  # by a build that was killed: ours is the lock
        shutil.rmtree(left, ignore_errors=True)
    try:
        building = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    except OSError as error:
        raise _not_writable(folder.parent, error) from error
    try:
        index = {"format": FORMAT, "title": title, **write(building)}
        (building / "index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
        if folder.exists():  # what an interrupted older build left
            shutil.rmtree(folder)
        building.rename(folder)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, OSError):  # of writing: what cannot be read is a DataError already
            raise _not_writable(folder.parent, error) from error
        raise


def _tokenise(corpus: Corpus, tokenizer_path: str, vocabulary: int, building: Path) -> dict[str, Any]:
    """Write the tokenizer and the streams of a corpus; the entries of index.json that depend on them."""
    if tokenizer_path:
        tokenizer = tokenization.read(Path(tokenizer_path).expanduser())
    else:
        tokenizer = tokenization.train(
            (document.text for document in corpus.documents() if not document.held_out), vocabulary
        )
    size = tokenization.vocabulary(tokenizer)
    kind = np.dtype("<u2") if size <= 2**16 else np.dtype("<u4")
    # Not tokenizer.save, which raises a bare Exception on a full disk.
    (building / tokenization.NAME).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    lengths, digest = _encode(building, corpus, tokenizer, kind)
    return {
        "dtype": kind.str,
        "vocabulary": size,
        "training_tokens": lengths["training"],
        "validation_tokens": lengths["validation"],
        "digest": digest,
    }


def _encode(building: Path, corpus: Corpus, tokenizer: Tokenizer, kind: np.dtype[Any]) -> tuple[dict[str, int], str]:
    """Tokenise every document into the two streams; their lengths and a digest of both."""
    end = tokenization.end_of_document(tokenizer)
    lengths = {"training": 0, "validation": 0}
    digest = xxhash.xxh3_64()
    with (building / "training.bin").open("wb") as training, (building / "validation.bin").open("wb") as validation:
        stream_of_documents = corpus.documents()
        while documents := list(islice(stream_of_documents, 64)):
            for document, numbers in zip(documents, _numbers(tokenizer, documents), strict=True):
                stream: BinaryIO = validation if document.held_out else training
                marked = end is None or numbers[-1:] == [end]  # some tokenizers set the mark themselves
                array = np.array(numbers if marked else [*numbers, end], dtype=kind)
                stream.write(array.tobytes())
                digest.update(array.tobytes())
                lengths["validation" if document.held_out else "training"] += len(array)
    return lengths, digest.hexdigest()


def _numbers(tokenizer: Tokenizer, documents: Iterable[Document]) -> list[list[int]]:
    return [item.ids for item in tokenizer.encode_batch([document.text for document in documents])]


def agree_on(tokens: TokenFiles, world: World) -> None:
    """Refuse another corpus than rank 0 reads: nodes may have different Python libraries or files.

    Every rank must call it; no collective. Raises DataError.
    """
    if world.place.rank == 0:
        world.store.set("corpus", tokens.digest)
    if tokens.digest != world.store.get("corpus").decode():
        raise DataError(
            f"rank {world.place.rank} reads another corpus ({tokens.folder}) than rank 0: name the same files on"
            " every node with --data.path"
        )
