"""From files to token streams: formats, the held-out part, the cache, and what a bad file says."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from runtime import flags
from runtime.config import Config
from runtime.data import corpus, tokens
from runtime.errors import DataError

TEXT = "".join(f"line {n} says that {n * n} is the square of {n}\n" for n in range(400))


def settings(path: Path, cache: Path, *more: str) -> Config:
    arguments = ["--data.path", str(path), "--data.cache", str(cache), "--data.sequence", "16", *more]
    return flags.load(["--preset", "debug", *arguments], {})


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
    with pytest.raises(DataError, match=r"--model\.vocabulary is 257; it must be at least \d+"):
        tokens.prepare(
            settings(
                *(tmp_path / "a.txt", tmp_path / "cache", "--data.tokenizer", str(own)),
                *("--model.vocabulary", "257"),
            )
        )


def test_bad_inputs_say_what_is_wrong(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="does not exist"):
        tokens.prepare(settings(tmp_path / "absent", cache))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no text files"):
        tokens.prepare(settings(tmp_path / "empty", cache))
    (tmp_path / "binary.txt").write_bytes(b"abc\xff\xfe" * 100)
    with pytest.raises(DataError, match=r"binary\.txt is not UTF-8 text \(byte 3\)"):
        tokens.prepare(settings(tmp_path / "binary.txt", cache))
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": 1}\n')
    with pytest.raises(DataError, match=r'bad\.jsonl, line 2: expected a JSON object with "text"'):
        tokens.prepare(settings(tmp_path / "bad.jsonl", cache))
    (tmp_path / "short.txt").write_text("short\n")
    with pytest.raises(DataError, match="too few for one sample"):
        tokens.prepare(settings(tmp_path / "short.txt", cache))
    assert not [path for path in cache.iterdir() if path.is_dir() and not (path / "index.json").exists()]


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
