"""NCCL RAS: text as in NCCL's documentation and issue 1911, JSON as its source writes it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from dtobs.cli import main
from dtobs.ras import judge, looks_like_ras, read_samples

HEAD = """NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
OK = HEAD + "    0         1         4         8        32        32   RUNNING      OK\n"
MISMATCH = (
    HEAD
    + "    0         1         4         8        32        32   RUNNING  MISMATCH\n\nErrors\n======\n\nWarnings\n========\n\n"
)
AHEAD = (
    MISMATCH
    + """#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124
  Rank 13 -- GPU 5 managed by process 323033 on node 10.137.190.124
"""
)
BEHIND = (
    MISMATCH
    + """#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  31 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1
"""
)
DEAD = MISMATCH.replace(
    "Errors\n======\n",
    "Errors\n======\n\nDEAD\n  1 job process is considered dead (unreachable via the RAS network)\n  Process 3487984 on node 172.16.64.213 managing GPU 5\n",
)
INCOMPLETE = (
    MISMATCH.replace("MISMATCH", "INCOMPLETE").replace(
        "Errors\n======\n",
        "Errors\n======\n\nINCOMPLETE\n  Missing communicator data from 1 job process\n  Process 3487984 on node 172.16.64.213"
        " managing GPU 5\n\n#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n  The missing rank: 21\n",
    )
    + "TIMEOUT\n  Encountered 2 communication timeouts while gathering communicator data\n"
)


def document(counts: dict[int, int], size: int = 4) -> str:
    """A RAS answer as JSON, one communicator."""
    ranks = [
        {
            "rank": rank, "host": "10.0.0.1", "pid": 7, "cuda_dev": rank, "nvml_dev": rank,
            "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False},
            "collective_counts": {"Broadcast": 1, "AllReduce": value, "Send": 5 * rank},
        }
        for rank, value in counts.items()
    ]  # fmt: skip
    return json.dumps(
        {
            "nccl_version": "2.28.7",
            "communicators": [
                {"hash": "0xabc", "secondary_hash": "0x1:0x2", "size": size, "ranks": ranks, "missing_ranks": []}
            ],
            "ras": {},
        }
    )


def judged(tmp_path: Path, *texts: str) -> tuple[str, tuple[int, ...], str] | None:
    for number, text in enumerate(texts):
        (tmp_path / f"sample{number}.txt").write_text(text)
    findings, _ = judge(read_samples(tmp_path))
    return (findings[0].code, findings[0].ranks, findings[0].confidence.value) if findings else None


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ((OK,), None),
        ((OK, OK), None),
        ((BEHIND,), ("rank-not-joined", (7,), "possible")),
        ((BEHIND, BEHIND), ("rank-not-joined", (7,), "likely")),
        ((BEHIND, BEHIND.replace("60", "62").replace("64", "66")), None),
        ((AHEAD, AHEAD), ("rank-not-joined", tuple(r for r in range(32) if r not in (12, 13)), "possible")),
        ((DEAD,), ("rank-dead", (), "likely")),
        ((INCOMPLETE,), ("rank-dead", (21,), "possible")),
        ((INCOMPLETE, INCOMPLETE), ("rank-dead", (21,), "likely")),
        ((INCOMPLETE, OK), None),
        ((document({0: 9, 1: 9, 2: 8, 3: 9}),) * 2, ("rank-not-joined", (2,), "likely")),
        ((document({0: 9, 1: 9, 2: 9, 3: 9}),) * 2, ("network-stalled", (), "possible")),
        ((document({0: 9, 1: 9, 2: 9, 3: 9}), document({0: 12, 1: 12, 2: 11, 3: 12})), None),
        ((document({0: 9, 1: 9, 2: 9, 3: 9}),), None),
        ((*(document({0: 9, 1: 9, 2: 8, 3: 9}),) * 2, document({0: 7, 1: 6})), ("rank-not-joined", (2,), "likely")),
        ((BEHIND, BEHIND, BEHIND.replace("60", "50").replace("64", "54")), ("rank-not-joined", (7,), "likely")),
        ((document({0: 9, 1: 9}).replace('"destroy_flag": false', '"destroy_flag": true'),) * 2, None),
        (
            (document({0: 0, 1: 0}).replace('"init_state": 0', '"init_state": 7'),) * 2,
            ("nccl-init-stuck", (), "possible"),
        ),
        ((DEAD + INCOMPLETE[INCOMPLETE.index("#0-0") :],), ("rank-dead", (21,), "likely")),
    ],
    ids=[
        "ok",
        "ok twice",
        "behind once",
        "behind twice",
        "moves",
        "ahead",
        "dead",
        "no answer once",
        "no answer twice",
        "answers again",
        "json behind",
        "still",
        "json moves",
        "json once",
        "moved before",
        "moved before, text",
        "ended",
        "begins",
        "dead and its rank",
    ],
)
def test_verdict(tmp_path: Path, texts: tuple[str, ...], wanted: tuple[str, tuple[int, ...], str] | None):
    assert judged(tmp_path, *texts) == wanted


@pytest.mark.parametrize(
    "text", ["$ ncclras -v\n" + BEHIND, "Fri Nov 20 11:02:09 UTC 2026\n" + BEHIND, f"[{document({0: 9, 1: 8})}]"]
)
def test_known_by_its_first_lines(text: str):
    assert looks_like_ras(text.encode())
    assert not looks_like_ras(b"NCCL version 2.26.2+cuda12.6\nepoch 1\n")


def test_errors_of_nccl_are_notes(tmp_path: Path):
    (tmp_path / "ras.json").write_text(document({0: 9, 1: 9}).replace('"async_error": 0', '"async_error": 6', 1))
    findings, notes = judge(read_samples(tmp_path))
    assert not findings
    assert "rank 0 error 6" in notes[-1]


def test_ok_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "ras.txt").write_text(OK)
    assert main(["diagnose", "--ras", str(tmp_path / "ras.txt")]) == 0
    assert "a job that stands still looks the same" in " ".join(capsys.readouterr().out.split())


def test_something_else_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "x.txt").write_text("hello\n{{{[" + "[" * 100_000)
    assert main(["diagnose", "--ras", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_live(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dtobs.diagnose.ras.BETWEEN_SECONDS", 0.0)
    server = socket.create_server(("127.0.0.1", 0))
    asked: list[bytes] = []

    def answer() -> None:
        for _ in range(2):
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(100))
                connection.sendall(BEHIND.encode())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert main(["diagnose", "--ras", f"127.0.0.1:{server.getsockname()[1]}"]) == 4
    thread.join(5)
    server.close()
    assert asked[0].lower().endswith(b"verbose status\n")
    assert "Rank 7 is at AllReduce #60" in capsys.readouterr().out
