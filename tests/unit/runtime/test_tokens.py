"""From files to token streams: formats, the held-out part, the cache, and what a bad file says."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, processors

from runtime import flags
from runtime.config import Config
from runtime.data import corpus, tokenization, tokens
from runtime.errors import DataError

TEXT = "".join(f"line {n} says that {n * n} is the square of {n}\n" for n in range(400))


def settings(path: Path, cache: Path, *more: str) -> Config:
    arguments = ["--data.path", str(path), "--data.cache", str(cache), "--data.sequence", "16", *more]
    return flags.load(["--preset", "debug", *arguments], {})


@pytest.mark.parametrize("file", ["training.bin", "tokenizer.json", "index.json"])
def test_a_full_cache_is_one_line_and_nothing_stays(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    cache = tmp_path / "cache"
    make = tempfile.mkdtemp

    def on_a_full_disk(**options: Any) -> str:
        folder = make(**options)
        (Path(folder) / file).symlink_to("/dev/full")
        return folder

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkdtemp", on_a_full_disk)
        with pytest.raises(DataError) as caught:
            tokens.prepare(settings(tmp_path / "a.txt", cache))
    assert str(caught.value) == (
        f"cannot write the corpus cache {cache}: No space left on device; choose another with --data.cache"
    )
    (lock,) = cache.iterdir()
    (cache / f"{lock.stem}killed").mkdir()
    files = tokens.prepare(settings(tmp_path / "a.txt", cache))
    assert set(cache.iterdir()) == {lock, files.folder}


def decode(files: tokens.TokenFiles) -> str:
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    return str(tokenizer.decode([*files.training.tolist(), *files.validation.tolist()]))


def test_text_comes_back_and_a_part_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    files = tokens.prepare(settings(tmp_path / "a.txt", tmp_path / "cache"))
    assert sorted(decode(files).splitlines()) == sorted(TEXT.splitlines())
    share = len(files.validation) / (len(files.training) + len(files.validation))
    assert 0.02 < share < 0.06
    assert files.training.dtype == np.uint16


def test_formats_of_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.md").write_text(TEXT)
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": f"row {n}"}) for n in range(3)))
    (folder / ".hidden").write_text("secret")
    (folder / "c.pyc").write_bytes(b"\xff\xfe")
    texts = [document.text for document in corpus.from_path(folder).documents()]
    assert texts[-3:] == ["row 0", "row 1", "row 2"]
    assert "".join(texts[:-3]) == TEXT


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary("int32", "string")])
def test_parquet_is_read_row_by_row(tmp_path: Path, kind: pyarrow.DataType) -> None:
    texts = [f"row {n} says {n * n}" for n in range(2000)] + [None]
    table = pyarrow.table({"number": range(2001), "text": pyarrow.array(texts, pyarrow.string()).cast(kind)})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=300, compression="zstd")
    read = [document.text for document in corpus.from_path(tmp_path / "rows.parquet").documents()]
    assert read == [*texts[:-1], ""]
    files = tokens.prepare(settings(tmp_path / "rows.parquet", tmp_path / "cache"))
    assert "row 1999 says 3996001" in decode(files)


@pytest.mark.parametrize(("kind", "written"), [("<u2", "<u2"), (">i8", "<u2"), ("<u4", "<u4")])
def test_token_numbers_of_another_tool(tmp_path: Path, kind: str, written: str) -> None:
    numbers = np.random.default_rng(0).integers(0, 500, 3000).astype(kind)
    numbers[7] = 70_000 if written == "<u4" else 511
    np.save(tmp_path / "a.npy", numbers)
    config = settings(tmp_path / "a.npy", tmp_path / "cache", "--model.vocabulary", "70016")
    files = tokens.prepare(config)
    assert files.training.dtype == np.dtype(written)
    assert [*files.training.tolist(), *files.validation.tolist()] == numbers.tolist()
    assert (len(files.validation), files.vocabulary) == (150, int(numbers.max()) + 1)
    assert tokens.prepare(config).folder == files.folder
    with pytest.raises(DataError, match=r"a\.npy go up to \d+ and --model\.vocabulary is 300; it must be at least"):
        tokens.prepare(settings(tmp_path / "a.npy", tmp_path / "cache", "--model.vocabulary", "300"))


def shipped_tokenizer(folder: Path, vocabulary: int = 300) -> Tokenizer:
    """As a Hugging Face model has it: marks of its own, set to cut and to fill up, numbers with a gap."""
    own = tokenization.train([TEXT], vocabulary)
    end = ("<|end|>", own.token_to_id("<|end|>"))
    own.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=[end])
    own.enable_truncation(8)
    own.enable_padding(length=64, pad_token="<|end|>")
    table = json.loads(own.to_str())
    table["model"]["vocab"]["late"] = 400
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(table))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("by_folder", [True, False])
def test_a_tokenizer_by_its_path(tmp_path: Path, by_folder: bool) -> None:
    own = shipped_tokenizer(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{n} {TEXT}"}) + "\n" for n in range(3)))
    path = tmp_path / "model" if by_folder else tmp_path / "model" / "tokenizer.json"
    files = tokens.prepare(settings(tmp_path / "a.jsonl", tmp_path / "cache", "--data.tokenizer", str(path)))
    assert files.vocabulary == 401
    stream = files.training.tolist()
    assert stream.count(own.token_to_id("<|end|>")) == 3  # no document was cut, filled up or marked twice
    assert own.decode(stream).count("399 says that 159201") == 3


def test_pre_tokenised_data_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    first = tokens.prepare(settings(tmp_path / "a.txt", tmp_path / "cache"))
    second = tokens.prepare(settings(first.folder, tmp_path / "unused"))
    assert second.digest == first.digest
    assert not (tmp_path / "unused").exists()


def test_many_at_once_build_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    config = settings(tmp_path / "a.txt", tmp_path / "cache")
    builds: list[Path] = []
    build = tokens._build

    def counted(folder: Path, *rest: object) -> None:
        builds.append(folder)
        build(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens, "_build", counted)
    with ThreadPoolExecutor(4) as pool:
        digests = {files.digest for files in pool.map(lambda _: tokens.prepare(config), range(4))}
    assert len(builds) == len(digests) == 1


def test_a_changed_corpus_is_built_again(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    config = settings(file, tmp_path / "cache")
    first = tokens.prepare(config).digest
    file.write_text(TEXT.replace("square", "double"))
    assert tokens.prepare(config).digest != first


def test_an_own_tokenizer_must_fit_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    own = tokens.prepare(settings(tmp_path / "a.txt", tmp_path / "cache")).folder / "tokenizer.json"
    with pytest.raises(DataError, match=r"go up to \d+ and --model\.vocabulary is 257; it must be at least \d+"):
        tokens.prepare(
            settings(
                *(tmp_path / "a.txt", tmp_path / "cache", "--data.tokenizer", str(own)),
                *("--model.vocabulary", "257"),
            )
        )


def write_parquet(path: Path, **columns: object) -> None:
    parquet.write_table(pyarrow.table(columns), path)


BAD_INPUTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty.txt", lambda p: p.touch(), "--data.path {path} is empty"),
    ("empty", lambda p: p.mkdir(), "--data.path {path} holds no text files"),
    ("absent", lambda p: None, "--data.path {path} does not exist"),
    (
        "short.txt",
        lambda p: p.write_text("short\n"),
        "short.txt has 3 training tokens, too few for one sample of",
    ),
    (
        "latin.txt",
        lambda p: p.write_bytes(b"line\n" * 30_000 + b"caf\xe9\n"),
        "{path} is not UTF-8 text (line 30001, byte 4 of it)",
    ),
    (
        "a.jsonl",
        lambda p: p.write_text('{"text": "fine"}\n\n{"txt": 1, "b": 2}\n'),
        "{path}, line 3: expected a JSON object with \"text\", found an object with 'txt', 'b'",
    ),
    (
        "b.jsonl",
        lambda p: p.write_text('{"text": "fine"}\n{"text": "cut'),
        "{path}, line 2: not JSON (Unterminated string starting at, column 10)",
    ),
    (
        "c.jsonl",
        lambda p: p.write_text("[1]\n"),
        '{path}, line 1: expected a JSON object with "text", found a list',
    ),
    ("d.jsonl", lambda p: p.write_text('{"text": 5}\n'), '{path}, line 1: "text" is int, not a string'),
    ("e.jsonl", lambda p: p.write_text("[" * 100_000), "{path}, line 1: not JSON ("),
    (
        "a.parquet",
        lambda p: p.write_text("PAR"),
        "{path} is not a Parquet file that can be read: ",
    ),
    ("b.parquet", lambda p: write_parquet(p, body=["x"]), "{path} has no column \"text\"; it has 'body'"),
    ("c.parquet", lambda p: write_parquet(p, text=[1, 2]), 'the column "text" of {path} is int64, not text'),
    ("a.npy", lambda p: p.write_text("no"), "{path} is not a .npy file of numbers: "),
    (
        "b.npy",
        lambda p: np.save(p, np.zeros((2, 3))),
        "{path} holds float64[2, 3]; token numbers are one row of",
    ),
    ("c.npy", lambda p: np.save(p, np.array([1, -1])), "{path} holds -1: token numbers are 0 to 4294967295"),
    ("d.npy", lambda p: np.save(p, np.zeros(0, int)), "{path} is empty"),
]


@pytest.mark.parametrize(("name", "make", "message"), BAD_INPUTS, ids=[case[0] for case in BAD_INPUTS])
def test_a_bad_input_is_one_line_that_says_where(
    tmp_path: Path, name: str, make: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(DataError) as caught:
        tokens.prepare(settings(path, tmp_path / "cache"))
    text = str(caught.value)
    assert text.startswith(message.format(path=path))
    assert "\n" not in text
    folders = [left for left in (tmp_path / "cache").glob("*") if left.is_dir()]
    assert all((left / "index.json").exists() for left in folders)


def test_a_bad_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(DataError, match=rf"--data\.tokenizer {tmp_path} holds no tokenizer\.json"):
        tokens.prepare(settings(tmp_path / "a.txt", tmp_path / "cache", "--data.tokenizer", str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer: "):
        tokens.prepare(settings(tmp_path / "a.txt", tmp_path / "cache", "--data.tokenizer", str(tmp_path)))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a\.parquet needs pyarrow: pip install 'dtobs\[parquet\]'"):
        tokens.prepare(settings(tmp_path / "a.parquet", tmp_path / "cache"))


def test_a_truncated_stream_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    files = tokens.prepare(settings(tmp_path / "a.txt", tmp_path / "cache"))
    stream = files.folder / "training.bin"
    stream.write_bytes(stream.read_bytes()[:-1])
    with pytest.raises(DataError, match="not as long as its index says"):
        tokens.open_folder(files.folder)


def test_the_default_corpus_needs_no_download(tmp_path: Path) -> None:
    library = corpus.standard_library(200_000)
    assert sum(path.stat().st_size for path in library.files) <= 200_000
    assert all(path.suffix == ".py" for path in library.files)


def test_the_default_corpus_leaves_out_what_is_installed_and_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.py", "json/b.py", "json/test/c.py", "site-packages/torch/d.py", "json/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert corpus.standard_library(1000).files == (tmp_path / "a.py", tmp_path / "json" / "b.py")
