"""A byte-level BPE tokenizer: trained on the corpus, or read from a `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.errors import DataError

NAME = "tokenizer.json"
END_OF_DOCUMENT = "<|end|>"
_TRAINING_CHARACTERS = 8_000_000  # merges hardly change beyond this much text


def train(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer of at most `vocabulary` tokens (257 at least: the bytes and the end-of-document mark)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(texts), trainer)
    return tokenizer


def _beginning(texts: Iterable[str]) -> Iterator[str]:
    left = _TRAINING_CHARACTERS
    for text in texts:
        if left <= 0:
            return
        left -= len(text)
        yield text


def read(path: Path) -> Tokenizer:
    """The tokenizer at `path` (a tokenizer.json or the folder that holds one)."""
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"--data.tokenizer {path} holds no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
        # Settings that some are shipped with; they would cut documents, or fill them up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except Exception as error:  # the tokenizers library raises bare Exception for any bad file
        raise DataError(f"{file} is not a tokenizer: {error}") from error


def vocabulary(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs: the highest number a token has, and one. Numbers may have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def vocabulary_digest(folder: Path) -> str:
    """Tells tokenizers apart by what each number means; "" where the folder holds none."""
    if not (folder / NAME).is_file():
        return ""
    meanings = sorted((number, token) for token, number in read(folder).get_vocab().items())
    return xxhash.xxh3_64_hexdigest(repr(meanings).encode())


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """The number of the token between documents, by the names in common use; None where there is none."""
    for name in (END_OF_DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"):
        number = tokenizer.token_to_id(name)
        if number is not None:
            return int(number)
    return None
