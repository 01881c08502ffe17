"""Ranks of a host, found in a folder that looks like /proc."""

from __future__ import annotations

from pathlib import Path

from dtobs.host.activity import Activity, activities
from dtobs.host.training import named_processes, training_processes

PYTHON = "/usr/bin/python3\0train.py\0"


def process(proc: Path, pid: int, parent: int, command: str = PYTHON, cpu: int = 0, **environment: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_text(command)
    (folder / "environ").write_text("".join(f"{name}={value}\0" for name, value in environment.items()))
    fields = ["S", str(parent), *["0"] * 9, str(cpu), "0", "0", "0", *["0"] * 4, str(pid), *["0"] * 30]
    (folder / "stat").write_text(f"{pid} (python (x)) {' '.join(fields)}\n")
    (folder / "io").write_text(f"rchar: {cpu}\nwchar: 1\nsyscr: 9\n")


def job(proc: Path, run: str = "a", first: int = 100) -> None:
    launcher = "/usr/bin/python3\0/usr/bin/torchrun\0train.py\0"
    process(proc, first, 1, launcher, TORCHELASTIC_RUN_ID=run)
    for rank in range(2):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": run, "NCCL_RAS_ADDR": "h:1"}
        process(proc, first + 10 + rank, first, **env)
        process(proc, first + 20 + rank, first + 10 + rank, **env)  # a loader worker
        process(proc, first + 30 + rank, 1, "/usr/bin/python3\0-m\0dtobs.monitor\0", **env)


def test_ranks_and_not_their_helpers(tmp_path: Path):
    job(tmp_path)
    process(tmp_path, 7, 1, "/usr/bin/bash\0", RANK="3", WORLD_SIZE="2")
    assert [(one.pid, one.rank, one.world) for one in training_processes(tmp_path)] == [(110, 0, 2), (111, 1, 2)]
    assert training_processes(tmp_path)[0].setting("NCCL_RAS_ADDR") == "h:1"


def test_a_wrapper_is_not_the_rank_that_it_starts(tmp_path: Path):
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "9"}
    process(tmp_path, 7, 1, "timeout\x00300\x00python\x00train.py\0", **env)
    process(tmp_path, 8, 7, "bash\0-c\0python train.py; echo done\0", **env)
    process(tmp_path, 9, 8, "ray::train()\0", **env)  # a title that the program gave itself
    process(tmp_path, 10, 9, **env)
    (tmp_path / "8" / "exe").symlink_to("/usr/bin/bash")
    (tmp_path / "9" / "exe").symlink_to("/opt/venv/bin/python3.12")
    assert [one.pid for one in training_processes(tmp_path)] == [9]
    assert [one.pid for one in named_processes([7], tmp_path)] == [9]
    (tmp_path / "9" / "exe").unlink()
    assert [one.pid for one in named_processes([9], tmp_path)] == [10]


def test_jobs_stay_apart(tmp_path: Path):
    job(tmp_path)
    job(tmp_path, "b", 200)
    assert [(one.pid, one.rank) for one in training_processes(tmp_path)] == [(110, 0), (111, 1), (210, 0), (211, 1)]


def test_launcher_stands_for_its_ranks(tmp_path: Path):
    job(tmp_path)
    assert [one.pid for one in named_processes([100], tmp_path)] == [110, 111]
    assert [one.pid for one in named_processes([111, 110], tmp_path)] == [110, 111]


def test_slurm_tasks(tmp_path: Path):
    for task in range(2):
        process(tmp_path, 300 + task, 1, SLURM_PROCID=str(task), SLURM_NTASKS="2", SLURM_JOB_ID="9")
    assert [(one.pid, one.rank, one.world) for one in training_processes(tmp_path)] == [(300, 0, 2), (301, 1, 2)]


def test_spawned_processes_are_numbered_by_age(tmp_path: Path):
    process(tmp_path, 400, 1)
    spawned = "/usr/bin/python3\0-c\0from multiprocessing.spawn import spawn_main; spawn_main()\0"
    for pid in (403, 402):
        process(tmp_path, pid, 400, spawned)
    process(tmp_path, 404, 402, spawned)  # a worker of a rank
    assert [(one.pid, one.rank) for one in named_processes([400], tmp_path)] == [(402, 0), (403, 1)]


def test_nothing_there(tmp_path: Path):
    assert training_processes(tmp_path / "none") == []
    assert named_processes([1], tmp_path) == []


def test_activity_counts_children(tmp_path: Path):
    process(tmp_path, 1, 0, cpu=100)
    process(tmp_path, 2, 1, cpu=200)
    process(tmp_path, 3, 2, cpu=400)
    found = activities([1, 3, 99], tmp_path)
    assert found[1].io_bytes == 703
    assert found[1].cpu_seconds > found[3].cpu_seconds > 0
    assert found[99] == Activity(0.0, 0)
