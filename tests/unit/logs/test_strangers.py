"""What people paste who ask for help: the answer is right, or it says honestly that it cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.diagnose import diagnose_logs
from tests.unit.logs.pasted import EXCERPTS
from tests.unit.logs.strangers import Answer


@pytest.mark.parametrize(("text", "answer"), [row[1:] for row in EXCERPTS], ids=[row[0] for row in EXCERPTS])
def test_excerpt(tmp_path: Path, text: str, answer: Answer):
    path = tmp_path / "pasted.log"
    path.write_text(text)
    found = diagnose_logs([str(path)])
    assert (None if found.verdict is None else (found.verdict.code, found.verdict.ranks)) == answer
    if answer is None:
        assert not found.findings


ELSEWHERE = "Process 12345 has 60.10 GiB memory in use. "
OWN = "Including non-PyTorch memory, this process has 17.00 GiB memory in use. "
AS_A_CONTAINER_HAS_IT = "Process 777 has 74.53 GiB memory in use. "
UNKNOWN = "Process 888 has 17179869184.00 GiB memory in use. "
RESERVED = (
    "Of the allocated memory 63.32 GiB is allocated by PyTorch, and 9.85 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("told", "other"),
    [
        (ELSEWHERE + OWN + RESERVED, "process 12345 holds 60.10 GiB"),
        (AS_A_CONTAINER_HAS_IT + RESERVED, ""),
        (ELSEWHERE + AS_A_CONTAINER_HAS_IT + RESERVED, "process 12345 holds 60.10 GiB"),
        (UNKNOWN + OWN, ""),
    ],
)
def test_memory_of_another_process_is_told_and_the_ranks_own_is_not(tmp_path: Path, told: str, other: str):
    path = tmp_path / "pasted.log"
    path.write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 2 has a total capacity of 79.15 GiB"
        f" of which 4.61 GiB is free. {told}\n"
    )
    verdict = diagnose_logs([str(path)]).verdict
    assert verdict is not None
    assert verdict.code == "device-out-of-memory"
    assert other in verdict.summary
    assert ("holds" in verdict.summary) == bool(other)
