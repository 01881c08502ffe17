"""What is known of a rank's place, and that nothing is pretended where it is not known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed.fsdp

from dtobs.detectors import run_detectors
from dtobs.detectors.silent.ledger_looks import judged_looks
from dtobs.detectors.silent.sample_ledger import streams
from dtobs.recording.view import load_run
from tests.harness import run_ranks
from tests.multiprocess.layout_programs import (
    describe_flat,
    describe_mesh,
    given_before_it_is_wrapped,
    sharded_along_names,
    split_sequences,
    train_by_hand,
    train_others_by_hand,
    train_tensor_parallel,
    wrap,
)


@pytest.mark.parametrize(
    ("names", "shape", "data_ranks"),
    [
        (("replicate", "shard", "tensor"), (2, 2, 2), (1, 3, 5, 7)),
        (("pp", "dp", "tp"), (2, 2, 2), (5, 7)),
        (("dp_replicate", "dp_shard"), (2, 2), (0, 1, 2, 3)),
        (("pipeline", "context"), (2, 2), (3,)),
        (("dp_cp", "tp"), (2, 2), ()),  # both at once: not known
        (("fast", "slow"), (2, 2), ()),
        (("fast", "dp"), (1, 4), (0, 1, 2, 3)),  # nobody along it
    ],
)
def test_data_ranks_follow_from_the_names_of_the_mesh(names, shape, data_ranks):
    (result,) = run_ranks(describe_mesh, 1, names, shape, init_pg=False)
    assert result.value["data_ranks"] == data_ranks
    assert result.value["stage"] == (1 if names[0] in ("pp", "pipeline") else 0)


@pytest.mark.parametrize("own", [False, True])
def test_ranks_that_split_sequences_have_to_split_the_same(tmp_path: Path, own: bool):
    for result in run_ranks(split_sequences, 2, tmp_path, own):
        told, part = result.value
        assert told == part
    view = load_run(tmp_path)
    assert [int(p["probe_failures"]) for p in view.pages] == [0, 0]
    found = run_detectors(view, ("silent",))
    assert [(f.code, f.ranks, f.step) for f in found] == [("data-mismatch", (0, 1), 1)] * own
    assert all("each splits sequences of its own" in f.summary for f in found)


@pytest.mark.parametrize("nan", [False, True])
def test_tensor_parallel(tmp_path: Path, nan: bool):
    tables = [r.value for r in run_ranks(train_tensor_parallel, 2, tmp_path, nan)]
    keys = [dict(table) for table in tables]
    assert keys[0]["norm.weight"] == keys[1]["norm.weight"] != ""
    assert keys[0]["up.weight"] != keys[1]["up.weight"]
    view = load_run(tmp_path)
    assert [int(p["probe_failures"]) for p in view.pages] == [0, 0]
    found = run_detectors(view, ("silent", "performance"))
    assert [(f.code, f.ranks, f.step) for f in found] == ([("gradient-nonfinite", (0, 1), 21)] if nan else [])
    window = view.steps()
    # Equal inputs by design, and each rank's norm is that of the matrices' slices it holds.
    assert (window.records["input_digest"][0] == window.records["input_digest"][1]).all()
    assert np.isfinite(window.field("local_norm")[:, :20]).all()


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        *(("buffer", wrong) for wrong in ("", "flip")),
        ("one by one", "scaled"),
        ("buffers", "flip"),
        ("shared out", "not sent"),
        *(
            pytest.param(how, wrong, marks=pytest.mark.exhaustive)
            for how, wrongs in (
                ("buffer", ("start", "data")),
                ("one by one", ("", "start", "flip", "data", "not reduced")),
                ("hooks", ("", "start", "flip", "data")),
                ("buffers", ("",)),
                ("shared out", ("",)),
            )
            for wrong in wrongs
        ),
    ],
)
def test_copies_are_learned_from_where_gradients_are_reduced(tmp_path: Path, how: str, wrong: str):
    tables = [r.value for r in run_ranks(train_by_hand, 4, tmp_path, how, wrong)]
    assert tables[0] == tables[2] != tables[1] == tables[3]
    assert all(key.startswith("copies:2:") for table in tables for key in table.values())
    found = [(f.code, f.ranks, f.step) for f in run_detectors(load_run(tmp_path), ("silent",))]
    wanted = {
        "": [],
        "start": [(code, ranks, 0) for code in ("replica-divergence", "seed-policy") for ranks in ((0, 2), (1, 3))],
        "flip": [("replica-divergence", (0, 2), 19)],
        "scaled": [("replica-divergence", (0, 2), 20)],
        "not reduced": [
            (code, ranks, 20 if code == "replica-divergence" else 0)
            for code in ("gradients-not-synchronized", "replica-divergence")
            for ranks in ((0, 2), (1, 3))
        ],
        "not sent": [("replica-divergence", (0, 2), 20), ("replica-divergence", (1, 3), 20)],
        "data": [("data-overlap", (0, 2), 0), ("data-overlap", (1, 3), 0)],
    }
    assert [(code, ranks, step if code == "replica-divergence" else 0) for code, ranks, step in found] == wanted[wrong]


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("masters", "data"),
        ("shares", "flip"),
        *(
            pytest.param(how, wrong, marks=pytest.mark.exhaustive)
            for how, wrong in (("masters", ""), ("masters", "flip"), ("shares", ""), ("shares", "data"))
        ),
    ],
)
def test_copies_are_learned_where_the_optimizer_trains_other_tensors(tmp_path: Path, how: str, wrong: str):
    tables = [r.value for r in run_ranks(train_others_by_hand, 4, tmp_path, how, wrong)]
    assert tables[0] == tables[2] != tables[1] == tables[3]
    assert all(key.startswith("copies:2:") for table in tables for key in table.values())
    found = [(f.code, f.ranks) for f in run_detectors(load_run(tmp_path), ("silent",))]
    wanted = {
        "": [],
        "flip": [("replica-divergence", (0, 2))],
        "data": [("data-overlap", (0, 2)), ("data-overlap", (1, 3))],
    }
    assert found == wanted[wrong]


def test_gradients_that_are_reduced_by_their_maximum(tmp_path: Path):
    run_ranks(train_by_hand, 4, tmp_path, "one by one", "largest")
    (found,) = run_detectors(load_run(tmp_path), ("silent",))
    assert (found.code, found.ranks, found.aspect) == ("gradient-scale-mismatch", (0, 1, 2, 3), "not summed")
    assert found.summary.startswith("ranks 0-3 reduce gradients by max, element by element, instead of a sum")


def test_the_wrapper_of_a_model_that_the_program_goes_past():
    assert [result.value for result in run_ranks(wrap, 2)] == [[True] * 5] * 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "plain"])
def test_a_model_that_is_wrapped_after_it_was_given(tmp_path: Path, kind: str):
    run_ranks(given_before_it_is_wrapped, 2, tmp_path, kind)
    view = load_run(tmp_path)
    for rank in (0, 1):
        steps, page = view.rank_steps(rank), view.page(rank)
        assert (int(page["probe_failures"]), int(page["steps_done"])) == (0, 8)
        assert view.meta(rank).layout["kind"] == kind
        assert steps["micro_batches"].tolist() == [1] * 8
        assert np.isfinite(steps["local_norm"][1:]).all()
        assert len(view.meta(rank).params) == 4


@pytest.mark.parametrize(
    ("strategy", "copies"),
    [
        ("FULL_SHARD", [{0}, {1}, {2}, {3}]),
        ("HYBRID_SHARD", [{0, 2}, {1, 3}]),
        ("NO_SHARD", [{0, 1, 2, 3}]),
    ],
)
def test_who_holds_what_of_a_flat_parameter(strategy: str, copies: list[set[int]]):
    told = [result.value for result in run_ranks(describe_flat, 4, strategy)]
    assert {tuple(data_ranks) for data_ranks, _, _ in told} == {(0, 1, 2, 3)}
    assert all(lengths and lengths[0] >= 5 * 3 + 3 + 3 * 2 + 2 for _, _, lengths in told)
    together: dict[str, set[int]] = {}
    for rank, (_, (key,), _) in enumerate(told):
        together.setdefault(key, set()).add(rank)
    assert sorted(together.values(), key=min) == copies
    assert {int(key.split(":")[1]) for key in together} == {len(copies[0])}


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="needs torch 2.13")
@pytest.mark.parametrize("sharded", [True, False])
def test_gradients_are_followed_where_fsdp_works_along_named_dimensions(tmp_path: Path, sharded: bool):
    """The gradient of each rank is a DTensor then, a partial sum along the dimensions that FSDP adds it up over."""
    run_ranks(sharded_along_names, 2, tmp_path, sharded)
    view = load_run(tmp_path)
    assert [int(page["probe_failures"]) for page in view.pages] == [0, 0]
    assert [stream.batches[0].tolist() for stream in streams(view, [0, 1])] == [[1, 2], [1, 2]]
    assert view.meta(0).layout["data_ranks"] == [0, 1]
    looks = judged_looks(view)
    assert {look.name for look in looks} == {"0.weight", "2.weight"}
    assert {look.ranks for look in looks} == {(0, 1)}
    for look in looks:
        np.testing.assert_allclose(look.factors, 1.0, rtol=1e-3)
    assert np.isfinite(view.steps().field("local_norm")).all()
    assert [f.code for f in run_detectors(view) if f.code != "seed-policy"] == []
