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


@pytest.mark.parametrize("absent", [None, 3])
def test_batches_are_not_counted_as_collectives(tmp_path: Path, absent: int | None):
    """The first and the last stage of a pipeline issue fewer batches of messages than the others."""
    batch = "C2|sig|batch_op_issue|num_ops=1|async_op=t|comm=world\n"
    for rank in range(4):
        text = HEAD.format(rank=rank, world=4) + REDUCE.format(count=64) + batch
        for step in range(0, 30, 3):
            text += calls(1, "C1", step) + calls(1 if rank in (0, 3) else 2, "C2", step + 1)
        (tmp_path / f"clog_rank{rank}.log").write_text(text + opened("C1", 30) * (absent not in (None, rank)))
    found = diagnose_folder(tmp_path).verdict
    assert (found and (found.code, found.ranks)) == (absent and ("rank-not-joined", (absent,)))


def test_a_long_line_is_whole(tmp_path: Path):
    ranks = ",".join(map(str, range(0, 8000, 2)))
    split = f"split|parent=world|child=a|ranks={ranks}\nnew_comm|comm=a|rank=0|world_size=4000\n"
    reduce = REDUCE.replace("comm=world", "comm=a").format(count=8)
    (tmp_path / "clog.log").write_text(HEAD.format(rank=0, world=8000) + split + reduce + calls(1))
    assert read_clog(tmp_path / "clog.log")[1]["pg_config"]["a"]["ranks"] == str(list(range(0, 8000, 2)))


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
