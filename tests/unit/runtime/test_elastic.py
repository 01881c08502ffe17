"""The same global batch on any number of ranks, and where a restart finds its run directory."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore

from runtime import elastic, flags, manifests, mesh, plan, rundir
from runtime.config import Config
from runtime.errors import LayoutError
from runtime.manifests import Manifest
from runtime.mesh import Layout
from runtime.world import RankPlace, World


def settings(*arguments: str) -> Config:
    return flags.load(["--preset", "debug", *arguments], {})


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_every_number_of_ranks_that_divides_keeps_the_global_batch(samples: int, batch: int, ranks: int) -> None:
    asked, layout = settings("--data.batch", str(batch)), Layout(replicate=ranks)
    if samples % ranks:
        with pytest.raises(LayoutError, match=f"{ranks} data ranks cannot share"):
            elastic.keep_global_batch(asked, layout, samples)
        return
    kept = elastic.keep_global_batch(asked, layout, samples)
    assert kept.data.batch <= batch
    assert plan.micro_batches(kept, layout) * kept.data.batch * ranks == samples
    assert replace(kept, data=asked.data) == asked


@pytest.mark.parametrize(("ranks", "batch"), [(1, 4), (2, 2), (4, 1)])
def test_more_ranks_fill_a_pipeline_with_smaller_micro_batches(ranks: int, batch: int) -> None:
    asked, layout = settings("--parallel.pipeline", "2"), Layout(pipeline=2, replicate=ranks)
    kept = elastic.keep_global_batch(asked, layout, 8)
    assert (kept.data.batch, plan.micro_batches(kept, layout)) == (batch, 2)
    explicit = settings("--parallel.pipeline", "2", "--data.global_batch", "8")
    assert plan.fit_micro_batch(explicit, plan.resolve(explicit, 2 * ranks)).data.batch == batch
    with pytest.raises(LayoutError, match=r"2 micro-batches cannot fill 1F1B .* must be at least 32"):
        elastic.keep_global_batch(settings(), Layout(pipeline=4, replicate=8), 16)


def test_a_batch_that_does_not_divide_is_one_line_that_says_what_does() -> None:
    with pytest.raises(LayoutError) as caught:
        elastic.keep_global_batch(settings(), Layout(replicate=3), 8)
    assert str(caught.value) == (
        "3 data ranks cannot share the checkpoint's global batch of 8 samples: use 1, 2, 4, 8 of them, or choose"
        " another with --data.global_batch"
    )


@pytest.mark.parametrize(
    ("arguments", "layout", "samples"),
    [
        (("--data.batch", "4"), Layout(replicate=2), 8),
        (("--data.batch", "4", "--accumulate", "3"), Layout(replicate=2, tensor=2), 24),
        (("--data.batch", "2", "--data.global_batch", "16"), Layout(shard=4), 16),
        (("--data.batch", "2"), Layout(shard=4), 8),
        (("--data.batch", "2", "--pipeline.schedule", "DualPipeV"), Layout(pipeline=2, shard=4), 32),
    ],
)
def test_the_global_batch_of_a_checkpoint(arguments: tuple[str, ...], layout: Layout, samples: int) -> None:
    sizes = {name: getattr(layout, name) for name in mesh.DIMENSIONS}
    saved = Manifest(4, layout.world, sizes, {}, settings(*arguments).as_dict(), {})
    assert elastic.global_batch(saved) == samples


def save(root: Path, step: int, *arguments: str) -> Path:
    """A checkpoint without tensors, by a run of one rank with these settings."""
    saving, final = root / ".saving", root / f"step-{step:08d}"
    saving.mkdir(parents=True)
    sizes = dict.fromkeys(mesh.DIMENSIONS, 1)
    training, number = dict.fromkeys(manifests.TRAINING, 0), manifests.next_number(root)
    written = Manifest(step, 1, sizes, training, settings(*arguments).as_dict(), {}, number)
    manifests.write(written, saving, final)
    return final


def test_what_a_start_resumes_from(tmp_path: Path) -> None:
    own, base = tmp_path / "checkpoints", save(tmp_path / "base", 100, "--data.batch", "6")
    plain, named = settings(), settings("--resume", str(base))
    assert elastic._find(plain, own, restarted=False) == ("", 0)
    assert elastic._find(plain, own, restarted=True) == ("auto", 0)
    assert elastic._find(named, own, restarted=False) == (str(base), 6)
    assert elastic._find(named, own, restarted=True) == (str(base), 6)  # nothing of its own yet
    save(own, 4, "--data.batch", "3")
    (own / "step-00000008").mkdir()  # without a manifest: whoever loads it says so
    for asked in (plain, named):
        assert elastic._find(asked, own, restarted=True) == ("auto", 3)
    assert elastic._find(plain, own, restarted=False) == ("", 0)
    assert elastic._find(named, own, restarted=False) == (str(base), 6)


def test_a_restart_does_not_resume_the_run_that_was_left(tmp_path: Path) -> None:
    own, base = tmp_path / "checkpoints", save(tmp_path / "base", 20, "--data.batch", "6")
    for step in (20, 30, 40):
        save(own, step)
    manifests.note_start(own)
    anew, back = settings(), settings("--resume", str(base))
    assert elastic._find(back, own, restarted=True) == (str(base), 6)  # lost before its first save
    assert elastic._find(anew, own, restarted=True) == ("", 0)
    save(own, 21, "--data.batch", "3")
    for asked in (anew, back):
        assert elastic._find(asked, own, restarted=True) == ("auto", 3)
    shutil.rmtree(own)
    own.mkdir()
    manifests.note_start(own)  # forgets the earlier ones
    save(own, 4, "--data.batch", "5")
    assert elastic._find(back, own, restarted=True) == ("auto", 5)


def test_the_first_start_tells_the_restart_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(elastic.dist, "broadcast_object_list", lambda found, src: None)
    own, base = tmp_path / "checkpoints", save(tmp_path / "base", 20)
    save(own, 40)

    def resumes(restarted: bool) -> str:
        asked = settings("--resume", str(base))
        return elastic.resolve_after_restart(asked, Layout(), own, restarted=restarted).checkpoint.resume

    assert [resumes(False), resumes(True)] == [str(base), str(base)]
    save(own, 21)
    assert resumes(True) == "auto"


def test_what_each_rank_does_instead_is_said() -> None:
    asked = settings("--data.batch", "4")
    same = elastic.keep_global_batch(asked, Layout(replicate=2), 8)
    assert elastic.batch_note(asked, same, Layout(replicate=2)) == ""
    many = elastic.keep_global_batch(asked, Layout(replicate=4), 8)
    assert elastic.batch_note(asked, many, Layout(replicate=4)) == (
        "global batch of 8 samples kept: micro-batches of 2, 1 a step, on each of 4 data ranks (asked: 4, 1 a step)"
    )
    explicit = settings("--data.batch", "4", "--data.global_batch", "8")
    shared = plan.fit_micro_batch(explicit, Layout(replicate=4))
    assert elastic.batch_note(explicit, explicit, Layout(replicate=2)) == ""
    assert elastic.batch_note(explicit, shared, Layout(replicate=4)) == (
        "global batch of 8 samples kept: micro-batches of 2, 1 a step, on each of 4 data ranks (asked: 4)"
    )


def test_restarts_that_would_go_wrong_are_warned_of() -> None:
    shared = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    store, nothing_saved = elastic.warnings(shared, settings())
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in store
    assert "--checkpoint.every" in nothing_saved
    own = shared | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert elastic.warnings(own, settings("--checkpoint.every", "5")) == []
    assert elastic.warnings(shared | {"TORCHELASTIC_MAX_RESTARTS": "0"}, settings()) == []
    assert elastic.warnings({}, settings()) == []


class Nodes:
    """Ranks of one job, one a node; each launcher is told apart by a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local = threading.local()
        monkeypatch.setattr(rundir, "launcher_identity", lambda _: self.local.launcher)
        monkeypatch.setattr(rundir, "_group", lambda: (self.local.rank, self.size))
        self.size = 0

    def start(self, config: Config, *launchers: str) -> list[rundir.RunLocation]:
        """One start of the ranks: what each agrees on."""
        self.size = len(launchers)
        store, found = HashStore(), {}

        def rank(number: int) -> None:
            self.local.rank, self.local.launcher = number, launchers[number]
            place = RankPlace(number, self.size, 0, 1)
            found[number] = rundir.resolve_run_dir(config, World(place, PrefixStore("runtime", store), None))  # type: ignore[arg-type]

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [found[number] for number in range(self.size)]


def test_a_restart_finds_its_directory_whichever_node_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, config = Nodes(monkeypatch), settings("--run.root", str(tmp_path))
    (first, same) = nodes.start(config, "a", "b")
    assert first.path == same.path
    assert (first.restarted, json.loads((first.path / "config.json").read_text())["run"]["preset"]) == (
        False,
        "debug",
    )
    for launchers in (("b",), ("c", "b"), ("c",)):  # a is lost; c joins, and is rank 0; b is lost
        for agreed in nodes.start(config, *launchers):
            assert agreed == rundir.RunLocation(first.path, True)
    (other,) = nodes.start(config, "d")
    assert not other.restarted
    assert other.path != first.path
