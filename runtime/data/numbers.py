"""Token numbers that were made elsewhere: a `.npy` file with one row of integers, split once into the two streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from runtime.errors import DataError

_CHUNK = 1 << 20  # numbers
_VALIDATION_SHARE = 20  # the last twentieth is held out


def is_numbers(path: Path) -> bool:
    """True where `path` is to be read as token numbers instead of text."""
    return path.suffix.lower() == ".npy" and path.is_file()


def read(path: Path) -> npt.NDArray[np.integer[Any]]:
    """The numbers of a file, memory-mapped. Raises DataError where it holds anything else."""
    try:
        numbers = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is not a .npy file of numbers: {str(error).splitlines()[0]}") from error
    if not isinstance(numbers, np.ndarray) or numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        what = f"{numbers.dtype}{list(numbers.shape)}" if isinstance(numbers, np.ndarray) else "an archive"
        raise DataError(f"{path} holds {what}; token numbers are one row of integers")
    if not len(numbers):
        raise DataError(f"{path} is empty")
    return numbers


def split(path: Path, building: Path) -> dict[str, Any]:
    """Write the streams of `path` into `building`; the entries of index.json that depend on them."""
    numbers = read(path)
    least, most = _bounds(numbers)
    if least < 0 or most >= 2**32:
        raise DataError(f"{path} holds {least if least < 0 else most}: token numbers are 0 to 4294967295")
    kind = np.dtype("<u2") if most < 2**16 else np.dtype("<u4")
    cut = len(numbers) - len(numbers) // _VALIDATION_SHARE
    digest = xxhash.xxh3_64()
    for name, part in (("training", numbers[:cut]), ("validation", numbers[cut:])):
        with (building / f"{name}.bin").open("wb") as stream:
            for start in range(0, len(part), _CHUNK):
                data = part[start : start + _CHUNK].astype(kind).tobytes()
                stream.write(data)
                digest.update(data)
    return {
        "dtype": kind.str,
        "vocabulary": most + 1,
        "training_tokens": cut,
        "validation_tokens": len(numbers) - cut,
        "digest": digest.hexdigest(),
    }


def _bounds(numbers: npt.NDArray[np.integer[Any]]) -> tuple[int, int]:
    """The smallest and the largest number."""
    chunks = [numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK)]
    return min(int(chunk.min()) for chunk in chunks), max(int(chunk.max()) for chunk in chunks)
