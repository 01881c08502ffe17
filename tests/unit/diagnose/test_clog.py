"""torchcomms' clog files, judged as dumps are."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from dtobs.diagnose.folder import diagnose_folder
from dtobs.errors import DumpError, TargetError
from dtobs.flight_recorder.clog import looks_like_clog, read_clog

HEAD = "V|1|base_timestamp=1714234567.890\nnew_comm|comm=world|rank={rank}|world_size={world}\n"
REDUCE = "C1|sig|all_reduce|in_count={count}|out_count={count}|dtype=f32|red_op=sum|async_op=f|comm=world\n"
BROADCAST = "C2|sig|broadcast|in_count=1024|out_count=1024|dtype=f32|root=0|async_op=f|comm=world\n"


def calls(number: int, corr: str = "C1", first: int = 0) -> str:
    """Calls that ended."""
    return "".join(
        f"{corr}|Q|work_id={n + 1}|+{n / 10:.3f}\n{corr}|S|+{n / 10 + 0.01:.3f}\n{corr}|E|+{n / 10 + 0.02:.3f}\n"
        for n in range(first, first + number)
    )


def opened(corr: str = "C1", number: int = 20) -> str:
    """A call that was issued and does not end."""
    return f"{corr}|Q|work_id={number + 1}|+{number / 10:.3f}\n{corr}|S|+{number / 10 + 0.01:.3f}\n"


def write(folder: Path, odd: str | None, world: int = 4, rest: str = opened(), count: int = 1024) -> None:
    for rank in range(world):
        end = odd if rank == 2 and odd is not None else rest
        head = HEAD.format(rank=rank, world=world) + REDUCE.format(count=1024) + BROADCAST
        (folder / f"clog_rank{rank}.log").write_text(head + calls(20) + end)


@pytest.mark.parametrize(
    ("odd", "code", "ranks"),
    [("", "rank-not-joined", (2,)), (opened("C2"), "collective-mismatch", (2,)), (opened(), "network-stalled", ())],
)
def test_faults(tmp_path: Path, odd: str, code: str, ranks: tuple[int, ...]):
    write(tmp_path, odd)
    found = diagnose_folder(tmp_path)
    assert found.verdict is not None
    assert (found.verdict.code, found.world_size) == (code, 4)
    assert found.verdict.ranks == ranks or not ranks


def test_other_size(tmp_path: Path):
    write(tmp_path, REDUCE.replace("C1", "C3").format(count=77) + opened("C3"))
    found = diagnose_folder(tmp_path)
    assert found.verdict is not None
    assert (found.verdict.code, found.verdict.ranks) == ("shape-mismatch", (2,))


def test_healthy(tmp_path: Path):
    write(tmp_path, None, rest="")
    assert diagnose_folder(tmp_path).findings == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no communicator"),
        (HEAD.format(rank=0, world=2) + REDUCE.format(count=1) + "C1|Q|work_id=1|+0.1\n", "no S and E lines"),
        (HEAD.format(rank=0, world=2) + REDUCE.format(count=1) + "G1|C1|Q|work_id=1|+0.1\n", "CUDA graphs"),
    ],
)
def test_what_cannot_be_judged_says_why(tmp_path: Path, text: str, why: str):
    path = tmp_path / "clog_rank0.log"
    path.write_text(text or "V|1|base_timestamp=1.0\n")
    assert looks_like_clog(path.read_bytes())
    with pytest.raises(DumpError, match=why):
        read_clog(path)
    with pytest.raises(TargetError):
        diagnose_folder(tmp_path)


def test_mutated(tmp_path: Path):
    random = Random(4)
    whole = (
        HEAD.format(rank=0, world=2) + REDUCE.format(count=1024) + calls(4) + "split|parent=world|child=a|ranks=0,1\n"
    )
    path = tmp_path / "clog_rank0.log"
    for _ in range(300):
        text = list(whole)
        for _ in range(random.randint(1, 6)):
            at = random.randrange(len(text) + 1)
            text[at : at + random.randint(0, 20)] = random.choice(
                ["", "|", "\n", "9" * 40, "=", "C1|E|+", "\x1b[0m", "-1", "nan"]
            )
        path.write_text("".join(text))
        try:
            read_clog(path)
        except DumpError:
            pass
