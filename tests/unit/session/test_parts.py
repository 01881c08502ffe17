"""The small parts under the session: names of operators, call sites, run.json, patches. Tried with torch 2.13."""

from __future__ import annotations

import gc
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import dtobs
from dtobs.errors import UsageError
from dtobs.probes import backward as backward_module
from dtobs.probes import patches
from dtobs.probes.c10d_ops import canonical_name, discover
from dtobs.probes.call_site import INSTALLED, OURS, PYTHONS, USERS, CallSites, whose
from dtobs.recording.meta import MetaWriter, read_meta
from dtobs.recording.recorder import Recorder
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import load_run
from dtobs.session import Session, identity
from dtobs.session.identity import Identity, host_number, resolve_run_dir
from dtobs.session.restart import describe_setback
from dtobs.session.run_info import git_revision, hide_arguments, without_secrets
from dtobs.testing.fake_run import FakeRun
from tests.unit.session.conftest import make_model, train


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather"),
        ("c10d::allgather_into_tensor_coalesced_", "all_gather_coalesced"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::monitored_barrier_", "monitored_barrier"),
        ("c10d::recv_any_source_", "recv"),
        ("c10d::send", "send"),
        ("c10d::something_new_", "something_new"),
    ],
)
def test_names_of_operators(operator: str, name: str):
    assert canonical_name(operator) == name


def test_every_operator_of_this_torch_is_understood():
    found = {o.overload._schema.name: o for o in discover()}
    assert len(found) >= 20
    for operator in found.values():
        arguments = operator.overload._schema.arguments
        assert "ProcessGroup" in str(arguments[operator.group].type)
        assert "Tensor" in str(arguments[operator.payload].type)
    assert [n for n, o in found.items() if o.blocking] == ["c10d::monitored_barrier_"]


def test_a_call_site_is_the_users_line(tmp_path: Path):
    meta = MetaWriter(tmp_path / "meta.jsonl")
    sites = CallSites(meta)

    def library() -> int:
        return sites.here(0)

    here, again = library(), library()
    beside: list[int] = []
    thread = threading.Thread(target=eval, args=("found.append(here(0))", {"found": beside, "here": sites.here}))
    thread.start()
    thread.join()
    meta.close()
    assert here == again
    known = read_meta(tmp_path / "meta.jsonl").sites
    assert str(known[beside[0]]) == "another thread", "no line of the user's leads to it"
    site = known[here]
    assert (site.file, site.function.rsplit(".", 1)[-1]) == (__file__, "library")
    assert whose(torch.nn.__file__) == OURS
    assert whose(threading.__file__) == PYTHONS
    assert whose(pytest.__file__) == INSTALLED
    assert whose(__file__) == USERS


def test_a_frameworks_line_is_told_with_the_users_that_led_there(tmp_path: Path):
    meta = MetaWriter(tmp_path / "meta.jsonl")
    sites = CallSites(meta)
    inner, outer = (
        f"/venv/lib/python3.11/site-packages/{name}.py" for name in ("accelerate/operations", "trl/trainer")
    )
    scope: dict[str, Any] = {"here": sites.here}
    exec(compile("def gather():\n  return here(0)", inner, "exec"), scope)
    exec(compile("def evaluate():\n  return gather()", outer, "exec"), scope)

    def train() -> tuple[int, int]:
        return scope["evaluate"](), scope["gather"]()

    through, direct = train()
    meta.close()
    known = read_meta(tmp_path / "meta.jsonl").sites
    line = train.__code__.co_firstlineno + 1
    for number in (through, direct):
        assert str(known[number]).startswith(f"{__file__}:{line} in ")
        assert str(known[number]).endswith(".train (through accelerate/operations.py:2 in gather)")
    assert through == direct == train()[0], "the same two lines, however many of other packages lie between"


def test_secrets_are_left_out():
    config = {
        "api_key": "a",
        "tokens": 3,
        "tokenizer": "bpe",
        "hub": {"hf_token": "b", "list": [{"password": "c"}]},
    }
    assert without_secrets(config) == {
        "api_key": "(hidden)",
        "tokens": 3,
        "tokenizer": "bpe",
        "hub": {"hf_token": "(hidden)", "list": [{"password": "(hidden)"}]},
    }
    argv = ["train.py", "--api-key=a", "--hub.token", "b", "--data.tokens", "5", "--lr", "1"]
    assert hide_arguments(argv) == [
        "train.py",
        "--api-key=(hidden)",
        "--hub.token",
        "(hidden)",
        "--data.tokens",
        "5",
        "--lr",
        "1",
    ]


def test_git_revision(tmp_path: Path):
    assert git_revision(tmp_path) is None
    git = tmp_path / ".git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\nabc123 refs/heads/main\n")
    (tmp_path / "deep").mkdir()
    assert git_revision(tmp_path / "deep") == "abc123"
    (git / "refs/heads").mkdir(parents=True)
    (git / "refs/heads/main").write_text("def456\n")
    assert git_revision(tmp_path) == "def456"


def test_identity_from_torchrun():
    values = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_RUN_ID": "job7",
    }
    assert Identity.find(values) == Identity(5, 8, 1, 1, 2, "job7")
    assert Identity.find({}) == Identity(0, 1, 0, 0, 0, "")
    assert Identity.find({"RANK": "3", "WORLD_SIZE": "4"}).node == -1, "nothing says how many ranks a host has"
    open_mpi = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_LOCALID": "0"}
    assert Identity.find({"RANK": "3", "WORLD_SIZE": "4", **open_mpi}) == Identity(3, 4, 1, 1, 0, "")
    assert Identity.find({"RANK": "x", "TORCHELASTIC_RUN_ID": "none"}) == Identity(0, 1, 0, 0, 0, "")


def test_hosts_of_a_launcher_that_counts_none(monkeypatch: pytest.MonkeyPatch):
    """As under Ray, where each process is given one device and says that it is local rank 0."""
    store = HashStore()
    monkeypatch.setattr(identity, "_store", lambda: store)
    found = []
    for rank, host in enumerate(("b", "a", "b", "a")):
        monkeypatch.setattr(identity, "boot_id", lambda host=host: host)
        monkeypatch.setattr(identity, "_agreed", {})  # each is a process of its own
        found.append(host_number(Identity(rank, 4, 0, -1, 0)))
    assert found == [(0, True), (1, True), (0, False), (1, False)]


def test_a_restart_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("DTOBS_RUN_DIR", "DTOBS_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    first = dtobs.attach(name="tiny", monitor=False)
    first.close()
    started = json.loads((first.run_dir / "run.json").read_text())["started"]
    earlier = first.run_dir.rename(first.run_dir.with_name("20260101T000000Z-tiny"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = dtobs.attach(name="tiny", monitor=False)
    second.close()
    assert second.run_dir == earlier
    assert json.loads((earlier / "run.json").read_text())["started"] == started
    assert load_run(earlier).attempt == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun does not count a node that comes or goes
    joined = dtobs.attach(name="tiny", monitor=False)
    joined.close()
    assert joined.run_dir == earlier
    assert load_run(earlier).attempt == 2
    with monkeypatch.context() as other_agent:
        other_agent.setattr(identity.os, "getppid", lambda: 1)
        later = dtobs.attach(name="tiny", monitor=False)
        later.close()
    assert later.run_dir != earlier
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job8")
    third = dtobs.attach(name="tiny", monitor=False)
    third.close()
    assert third.run_dir != earlier


class Owner:
    def method(self) -> int:
        return 1

    def fail(self, cause: str) -> None:
        raise KeyError(cause)


def test_patches_are_undone_unless_somebody_came_after():
    original, seen = vars(Owner)["method"], []

    def around() -> Callable[[], None]:
        return patches.around(Owner, "method", lambda owner: seen.append("begin") is None, seen.append)

    undo = around()
    assert (Owner().method(), seen) == (1, ["begin", True])
    undo()
    assert vars(Owner)["method"] is original
    undo = around()
    ours = Owner.method
    Owner.method = lambda self: ours(self) + 10  # type: ignore[method-assign]
    undo()
    seen.clear()
    assert (Owner().method(), seen) == (11, [])  # theirs stays, and what it calls of ours does nothing
    Owner.method = original  # type: ignore[method-assign]
    with pytest.raises(AttributeError, match="absent"):
        patches.replace(Owner, "absent", lambda before: before)


def test_a_patch_of_one_instance_is_that_instances_and_keeps_nothing_alive():
    one, other = Owner(), Owner()
    undo = patches.replace(one, "method", lambda before: lambda: before() + 1)
    assert (one.method(), other.method()) == (2, 1)
    undo()
    assert "method" not in vars(one)
    undo = patches.replace(one, "method", lambda before: lambda: before() + 1)
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    undo()


def test_what_is_wrapped_conditionally_and_what_fails_inside():
    ended: list[object] = []
    undo = patches.around(Owner, "fail", lambda owner, cause: cause, ended.append, when=lambda owner, cause: cause)
    for cause in ("", "x"):
        with pytest.raises(KeyError):
            Owner().fail(cause)
    undo()
    assert ended == ["x"]


def test_bytes_of_sparse_tensors():
    from dtobs.probes.collectives import _bytes

    dense = torch.tensor([[0.0, 2.0], [0.0, 3.0]])
    assert _bytes(dense) == 16
    assert _bytes(dense.to_sparse()) == 2 * 4 + 2 * 2 * 8


def test_without_the_queue_of_callbacks_backward_is_still_seen(
    attach: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
):
    assert backward_module._queue_callback() is not None  # torch 2.13 has it
    monkeypatch.setattr(backward_module, "_queue_callback", lambda: None)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        train(model, optimizer, 2)
    view = load_run(session.run_dir)
    assert (view.rank_steps(0)["backward_ns"] > 0).all()
    assert view.page(0)["probe_failures"] == 0


def test_a_second_run_in_a_directory_is_another_attempt(tmp_path: Path):
    who = Identity(rank=0, world_size=1, local_rank=0, node=0, attempt=0)
    assert resolve_run_dir(tmp_path, "run", who) == (tmp_path, 0, True)
    Recorder(RunDirectory(tmp_path), 0, 1).close()
    assert resolve_run_dir(tmp_path, "run", who) == (tmp_path, 1, True)
    Recorder(RunDirectory(tmp_path), 3, 4, attempt=1).close()  # rank 0 was on a node with a disk of its own
    assert resolve_run_dir(tmp_path, "run", who) == (tmp_path, 2, True)


def test_ranks_under_agents_that_count_restarts_differently_find_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # An agent that joined late has restarted nothing yet; those that were there before have.
    store = HashStore()
    monkeypatch.setattr(identity, "_store", lambda: store)
    monkeypatch.setattr(identity, "_agreed", {})
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    first = Identity(rank=0, world_size=2, local_rank=0, node=0, attempt=1)
    late = Identity(rank=1, world_size=2, local_rank=0, node=1, attempt=0)
    assert resolve_run_dir(tmp_path, "run", first) == (tmp_path, 0, True)
    monkeypatch.setattr(identity, "_agreed", {})
    monkeypatch.setattr(identity, "AGREE_SECONDS", 1.0)
    assert resolve_run_dir(tmp_path, "run", late) == (tmp_path, 0, False)


def test_nobody_waits_below_dtobs_run_for_a_rank_0_that_never_makes_an_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = HashStore()
    monkeypatch.setattr(identity, "_store", lambda: store)
    monkeypatch.setattr(identity, "AGREE_SECONDS", 1.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("DTOBS_RUN_NAME", "run")
    for rank, first in ((2, True), (1, False), (0, False)):
        monkeypatch.setattr(identity, "_agreed", {})
        who = Identity(rank, world_size=3, local_rank=rank, node=0, attempt=0)
        assert resolve_run_dir(tmp_path, "run", who) == (tmp_path, 0, first)


def test_every_rank_of_a_second_live_job_is_refused_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = HashStore()
    monkeypatch.setattr(identity, "_store", lambda: store)
    monkeypatch.setattr(identity, "living", lambda path: {0: 4711})
    said = r"belongs to a job that still runs \(rank 0 is process 4711\): name another run directory"
    for rank in (0, 1):
        monkeypatch.setattr(identity, "_agreed", {})
        with pytest.raises(UsageError, match=said):
            resolve_run_dir(tmp_path, "run", Identity(rank, world_size=2, local_rank=rank, node=0, attempt=0))
    for mine in (os.getpid(), os.getppid()):
        monkeypatch.setattr(identity, "living", lambda path, mine=mine: {0: mine})
        assert resolve_run_dir(tmp_path, "run", Identity(0, 1, 0, 0, 0)) == (tmp_path, 0, True)


def test_a_second_live_job_trains_on_unrecorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(identity, "living", lambda path: {0: 4711})
    assert type(dtobs.attach(run_dir=tmp_path, monitor=False)) is Session
    assert "dtobs: not recording this run: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_restart_says_what_it_has_cost(tmp_path: Path):
    assert describe_setback(tmp_path, 1, 3) == ""
    run = FakeRun(tmp_path, world=1, start_ns=time.monotonic_ns() - 60_000_000_000)
    run.steps(11)  # 0 to 10, the last one ended 58.9 seconds ago
    assert re.fullmatch(
        r"restart 1: 3 steps to do again, [\d.]+ s since the last step ended",
        describe_setback(tmp_path, 1, 7),
    )
    assert "1 step to do again" in describe_setback(tmp_path, 1, 9)
    assert "0 steps to do again" in describe_setback(tmp_path, 1, 10)


def test_what_a_class_inherits_is_looked_up_at_each_call():
    """torch.fx puts a function of its own in the place of `nn.Module.__call__` while it traces."""

    class Base:
        def call(self) -> str:
            return "base"

    class Owner(Base):
        pass

    class Heir(Owner):
        pass

    before = Base.call
    Base.call = lambda self: "tracing"  # type: ignore[method-assign]
    undo = patches.around(Owner, "call", lambda _: None, lambda _: None)
    assert Heir().call() == "tracing"
    Base.call = before  # type: ignore[method-assign]
    assert (Owner().call(), Heir().call()) == ("base", "base")
    undo()
    assert "call" not in vars(Owner)
