"""Time that all ranks lose: communication, pipelines, uneven inputs, the host, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors import is_over
from dtobs.events import Kind, Phase, identify
from dtobs.recording.meta import Op
from dtobs.recording.plan import Plan
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import Change, findings, hand_on, noisy_run, only


def slow(seconds: float, **more: float) -> Change:
    """Steps of that many seconds on all ranks."""
    return lambda rank, step: {"forward": 0.4 * seconds, "backward": 0.6 * seconds, "exposed": 0.01} | more


class TestExposedCommunication:
    @pytest.mark.parametrize("world", [2, 4])
    def test_fires_when_even_the_last_to_arrive_waits(self, tmp_path: Path, world: int):
        found = only(noisy_run(tmp_path, world, 40, lambda rank, step: {"exposed": 0.5 + 0.1 * (rank == step % world)}))
        assert (found.code, found.ranks) == ("exposed-communication", tuple(range(world)))
        assert "most of it along data" in found.summary

    def test_the_dimension_is_named(self, tmp_path: Path):
        def change(rank: int, step: int) -> dict[str, float]:
            return {"exposed": 0.6, "exposed_data_ns": 0.1e9, "exposed_tensor_ns": 0.5e9}

        found = only(noisy_run(tmp_path, 2, 40, change))
        assert "most of it along tensor" in found.summary
        assert "within one machine" in found.next_step

    @pytest.mark.parametrize(
        "change",
        [
            lambda rank, step: {"exposed": 0.5 if rank else 0.01, "other": 0.01 if rank else 0.02},  # rank 0 is late
            lambda rank, step: {"exposed": 0.5 if rank == step % 2 else 0.01},  # in turn
            lambda rank, step: {"exposed": 5.0 if step == 20 else 0.02},  # once
            lambda rank, step: {"exposed": 0.005, "forward": 0.001, "backward": 0.001, "data": 0.0},  # a toy
            lambda rank, step: {"exposed": 0.5, "exposed_data_ns": 0.0, "exposed_pipeline_ns": 0.5e9},  # a bubble
            lambda rank, step: {"exposed": 0.5, "run_delay_ns": 0.3e9},  # fewer cores than ranks
            # A third of the time that ranks want a core, though but a sixth of the step: who waits wants none.
            lambda rank, step: {"forward": 0.3, "backward": 0.3, "exposed": 0.8, "run_delay_ns": 0.2e9},
            # They mostly sleep, and have no core for two fifths of the time in which they want one.
            lambda rank, step: {"exposed": 0.8, "run_delay_ns": 0.04e9, "cpu_ns": 0.06e9},
        ],
    )
    def test_stays_quiet(self, tmp_path: Path, change: Change):
        assert [f for f in findings(noisy_run(tmp_path, 2, 40, change)) if f.code == "exposed-communication"] == []

    def test_a_short_run_says_nothing(self, tmp_path: Path):
        assert findings(noisy_run(tmp_path, 2, 20, lambda rank, step: {"exposed": 0.3})) == []

    def test_one_rank_has_nobody_to_wait_for(self, tmp_path: Path):
        assert findings(noisy_run(tmp_path, 1, 40, lambda rank, step: {"exposed": 0.6})) == []


def accumulating(run: FakeRun, each: int, *, steps: int = 40, wait: float = 0.2, op: str = "all_reduce") -> FakeRun:
    """Steps of four micro-batches; a bucket is reduced after every `each`-th of them."""
    world = run.group()
    bucket = Op(op, "avg", ((4096,),), ("float32",))
    number = identify(str(bucket))
    for rank in run.ranks:
        rank.recorder.meta.define("op", number, op=op, reduce_op="avg", shapes=bucket.shapes, dtypes=bucket.dtypes)
        for step in range(steps):
            begin = rank.clock_ns
            for micro in range(4):
                rank.clock_ns = begin + (micro + 1) * 10_000_000
                if micro % each == each - 1:
                    rank.event(Kind.COLLECTIVE, group=world, op=number, phase=Phase.BACKWARD, seq=step * 4 + micro + 1)
            rank.clock_ns = begin
            rank.step(None, forward=0.2, backward=0.3, exposed=wait, micro_batches=4)
    return run


class TestSyncEveryMicrobatch:
    def test_fires(self, tmp_path: Path):
        found = only(accumulating(FakeRun(tmp_path, 2), 1))
        assert (found.code, found.ranks, str(found.confidence)) == ("sync-every-microbatch", (0, 1), "likely")
        assert "each of the 4 micro-batches" in found.summary and "costs no memory" in found.summary
        wait, spared = found.evidence[-2:]
        assert spared["seconds"] == pytest.approx(0.75 * wait["seconds"])

    def test_fsdp_may_do_it_for_its_memory(self, tmp_path: Path):
        layout = {"kind": "fsdp", "data_ranks": [0, 1], "stage": 0, "coordinates": {}, "dropout": 0}
        found = only(accumulating(FakeRun(tmp_path, 2, layout=layout), 1, op="reduce_scatter_tensor"))
        assert (found.code, str(found.confidence)) == ("sync-every-microbatch", "possible")
        assert "costs the memory of whole gradients" in found.summary

    @pytest.mark.parametrize(
        "made",
        [
            lambda run: accumulating(run, 4),  # once a step
            lambda run: accumulating(run, 2),  # of half of them: nobody forgot anything
            lambda run: accumulating(run, 1, wait=0.01),  # it costs nothing
            lambda run: accumulating(run, 1, steps=14),  # too short to say
            lambda run: accumulating(run, 1, op="all_gather"),  # parameters are gathered for each forward
        ],
    )
    def test_stays_quiet(self, tmp_path: Path, made: Callable[[FakeRun], FakeRun]):
        assert findings(made(FakeRun(tmp_path, 2))) == []


def pipeline(
    root: Path, compute: list[float], span: float, *, steps: int = 40, micro: int = 8, copies: int = 1
) -> FakeRun:
    """A 1F1B pipeline of one rank a stage that compute so many seconds of each step, in `copies` of it."""
    stages = len(compute)
    run = FakeRun(root, stages * copies, layout=None)
    for number, rank in enumerate(run.ranks):
        stage, copy = number % stages, number // stages
        peers = [stage + stages * c for c in range(copies)]
        rank.meta("layout", kind="plain", data_ranks=peers, stage=stage, coordinates={}, dropout=0)
        members = tuple(range(copy * stages, (copy + 1) * stages))
        plan = Plan("Schedule1F1B", micro, (stage,), stages, members)
        rank.meta("pipeline", **vars(plan))
        for _ in range(steps):
            begin, own = rank.clock_ns, compute[stage]
            fields = {
                "pipeline_begin_ns": begin,
                "pipeline_end_ns": begin + span * 1e9,
                "pipeline_compute_ns": own * 1e9,
            }
            waits = {"exposed": span - own, "exposed_data_ns": 0.0, "exposed_pipeline_ns": (span - own) * 1e9}
            rank.step(None, forward=own / 3, backward=own * 2 / 3, **waits, **fields)
    return run


class TestPipelines:
    def test_a_long_stage(self, tmp_path: Path):
        found = only(pipeline(tmp_path, [0.3, 0.3, 0.6, 0.3], 0.75))
        assert (found.code, found.ranks, str(found.confidence)) == ("stage-imbalance", (2,), "possible")
        assert found.summary.startswith("rank 2 (stage 2) computes 2.00 times as long")

    def test_a_long_stage_of_every_copy(self, tmp_path: Path):
        found = findings(pipeline(tmp_path, [0.3, 0.6], 0.7, copies=2))
        assert {(f.code, f.ranks, str(f.confidence)) for f in found} == {("stage-imbalance", (1, 3), "likely")}

    @pytest.mark.parametrize(
        ("compute", "order", "found"),
        [
            ([0.3, 0.3, 0.6, 0.3], [0, 1, 2, 3], [((2,), "rank 2 (stage 2) computes 1.9")]),
            ([0.3, 0.6, 0.3], [2, 1, 0], [((1,), "rank 1 (stage 1) computes 1.9")]),
            ([0.3, 0.6], [1, 0], [((1,), "rank 1 (stage 0) computes 1.9")]),
            ([0.5, 0.6], [0, 1], []),
            ([0.3, 0.3, 0.6], [], []),  # nobody hands anything on
        ],
    )
    def test_a_long_stage_of_a_pipeline_by_hand(
        self, tmp_path: Path, compute: list[float], order: list[int], found: list[tuple[tuple[int, ...], str]]
    ):
        run = FakeRun(tmp_path, len(compute), layout=None)
        hand_on(run, [order], 40)
        for rank, own in zip(run.ranks, compute, strict=True):
            for _ in range(40):
                waits = {"exposed": 0.7 - own, "exposed_data_ns": 0.0, "exposed_pipeline_ns": (0.7 - own) * 1e9}
                rank.step(None, forward=own / 3, backward=own * 2 / 3, **waits)
        told = findings(run)
        assert [(f.code, f.ranks) for f in told] == [("stage-imbalance", ranks) for ranks, _ in found]
        assert all(f.summary.startswith(words) for f, (_, words) in zip(told, found, strict=True))

    def test_idle_time_that_nothing_explains(self, tmp_path: Path):
        found = only(pipeline(tmp_path, [0.3, 0.3], 0.6))
        assert (found.code, found.ranks) == ("pipeline-bubble", (0, 1))
        assert "idles 50% of the time; 1F1B with 8 micro-batches needs 11%" in found.summary

    @pytest.mark.parametrize(
        ("compute", "span"),
        [
            ([0.5, 0.5], 0.57),  # the schedule's own bubble
            ([0.4, 0.5], 0.57),  # the first stage has no gradients of its inputs
            ([0.5, 0.6], 0.68),  # the head
            ([0.005, 0.02], 0.03),  # a toy
        ],
    )
    def test_stays_quiet(self, tmp_path: Path, compute: list[float], span: float):
        assert findings(pipeline(tmp_path, compute, span)) == []

    def test_few_micro_batches_have_a_large_bubble_of_their_own(self, tmp_path: Path):
        assert findings(pipeline(tmp_path, [0.25, 0.25, 0.25, 0.25], 0.44, micro=4)) == []

    def test_short_runs_are_not_judged(self, tmp_path: Path):
        assert findings(pipeline(tmp_path, [0.3, 0.9], 1.0, steps=14)) == []


def sequences(same: bool, world: int = 4, noise: float = 0.02, seldom: bool = False) -> Change:
    random = np.random.default_rng(5)
    sizes = random.integers(100, 900, (400, world)).astype(float)
    if seldom:
        sizes = np.where(random.random((400, world)) < 0.2, 900.0, 100.0)

    def change(rank: int, step: int) -> dict[str, float]:
        size = sizes[step, 0] if same else sizes[step, rank]
        most = size if same else sizes[step].max()
        own, longest = size / 1000 + noise, most / 1000 + noise
        return {
            "forward": own * 0.4,
            "backward": own * 0.6,
            "exposed": longest - own + 0.01,
            "input_elements": size,
        }

    return change


class TestSequenceImbalance:
    @pytest.mark.parametrize("world", [2, 4])
    def test_fires(self, tmp_path: Path, world: int):
        found = only(noisy_run(tmp_path, world, 60, sequences(same=False, world=world)))
        assert (found.code, found.ranks) == ("sequence-imbalance", tuple(range(world)))

    def test_fires_where_most_steps_are_even(self, tmp_path: Path):
        found = only(noisy_run(tmp_path, 2, 150, sequences(same=False, world=2, seldom=True)))
        assert (found.code, found.ranks) == ("sequence-imbalance", (0, 1))

    def test_the_same_lengths_on_all_ranks(self, tmp_path: Path):
        assert findings(noisy_run(tmp_path, 4, 60, sequences(same=True))) == []

    def test_a_slow_rank_is_no_imbalance(self, tmp_path: Path):
        def change(rank: int, step: int) -> dict[str, float]:
            fields = {"input_elements": 512.0}
            return fields | ({"forward": 0.5} if rank == 1 else {"exposed": 0.5})

        found = findings(noisy_run(tmp_path, 4, 60, change))
        assert {f.code for f in found} == {"straggler"}


def grouped(root: Path, seconds: list[float], *, calls: int = 20, late: int = -1) -> FakeRun:
    """Groups of two ranks that all-gather; each takes its own time from the arrival of the last member."""
    run = FakeRun(root, 2 * len(seconds))
    op = Op("all_gather", "", ((1024,),), ("float32",))
    number = identify(str(op))
    for pair, transfer in enumerate(seconds):
        ranks = (2 * pair, 2 * pair + 1)
        group = run.group(f"shard{pair}", ranks)
        for rank in map(run.rank, ranks):
            rank.recorder.meta.define("group", group, name=f"shard{pair}", ranks=ranks, backend="gloo")
            rank.recorder.meta.define("op", number, op=op.op, shapes=op.shapes, dtypes=op.dtypes)
            for seq in range(1, calls + 1):
                start = run.start_ns + seq * 1_000_000_000
                rank.clock_ns = start + (400_000_000 if rank.number == late else 0)
                rank.event(Kind.COLLECTIVE, group=group, op=number, seq=seq, value=1e6)
                rank.clock_ns = start + (400_000_000 if late in ranks else 0) + round(transfer * 1e9)
                rank.event(Kind.WAIT_END, group=group, seq=seq, value=transfer)
    return run


class TestSlowLink:
    def test_fires(self, tmp_path: Path):
        found = only(grouped(tmp_path, [0.03, 0.03, 0.12, 0.04]))
        assert (found.code, found.ranks) == ("slow-link", (4, 5))
        assert found.summary.startswith("all_gather among ranks 4 and 5 takes 120 ms from the arrival of its last")

    @pytest.mark.parametrize(
        "made",
        [
            lambda root: grouped(root, [0.03, 0.03, 0.05]),
            lambda root: grouped(root, [0.001, 0.001, 0.01]),  # nothing to win
            lambda root: grouped(root, [0.03, 0.12]),  # of two, which is odd?
            lambda root: grouped(root, [0.03, 0.03, 0.03], late=4),  # a late rank is no slow link
            lambda root: grouped(root, [0.03, 0.03, 0.2], calls=8),
        ],
    )
    def test_stays_quiet(self, tmp_path: Path, made: Callable[[Path], FakeRun]):
        assert findings(made(tmp_path)) == []


class TestHostBound:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"device_marks": 10, "device_idle_marks": 9}, "run out of work in 90% of the moments"),
            ({"gc_ns": 0.1e9}, "collect garbage in 20% of the time"),
            ({"throttled_ns": 2e9}, "have used up the processor time of their container in 100% of the time"),
        ],
    )
    def test_fires(self, tmp_path: Path, fields: dict[str, float], reason: str):
        found = only(noisy_run(tmp_path, 2, 60, slow(0.48, **fields)))
        assert (found.code, found.ranks) == ("host-bound", (0, 1))
        assert reason in found.summary

    @pytest.mark.parametrize(
        "fields",
        [
            {"device_marks": 10, "device_idle_marks": 3},
            {"device_marks": 10, "device_idle_marks": 9, "exposed": 0.2},  # it waits for others
            {"gc_ns": 0.01e9, "throttled_ns": 0.02e9},
        ],
    )
    def test_stays_quiet(self, tmp_path: Path, fields: dict[str, float]):
        assert [f for f in findings(noisy_run(tmp_path, 2, 60, slow(0.48, **fields))) if f.code == "host-bound"] == []


def after(step: int, seconds: float, **more: float) -> Change:
    """Steps of 0.5 s that from `step` on take `seconds` longer."""

    def change(rank: int, now: int) -> dict[str, float]:
        fields = slow(0.5)(rank, now)
        return fields | ({"backward": 0.3 + seconds} | more if now >= step else {})

    return change


class TestThroughputDrop:
    def test_fires_with_the_step_and_the_part(self, tmp_path: Path):
        found = only(noisy_run(tmp_path, 2, 120, after(60, 0.4)))
        assert (found.code, found.ranks, found.step) == ("throughput-drop", (), 60)
        assert "slower since step 60; most of it is backward (+400 ms a step)" in found.summary

    @pytest.mark.parametrize(
        ("field", "words"),
        [
            ("throttled_ns", "processor time used up by its container"),
            ("run_delay_ns", "waiting for a core that others use"),
            ("gc_ns", "collecting garbage"),
        ],
    )
    def test_the_host_explains_it(self, tmp_path: Path, field: str, words: str):
        found = findings(noisy_run(tmp_path, 2, 120, after(60, 0.4, **{field: 0.35e9})))
        (drop,) = [f for f in found if f.code == "throughput-drop"]
        assert f"most of it is {words}" in drop.summary

    def test_one_rank_is_named(self, tmp_path: Path):
        def change(rank: int, step: int) -> dict[str, float]:
            if step < 60:
                return slow(0.5)(rank, step)
            return {"forward": 0.8, "backward": 0.3} if rank == 1 else slow(0.5, exposed=0.6)(rank, step)

        (drop,) = [f for f in findings(noisy_run(tmp_path, 3, 120, change)) if f.code == "throughput-drop"]
        assert drop.ranks == (1,)
        assert "forward on rank 1" in drop.summary

    def test_short_steps_are_looked_at_for_as_long(self, tmp_path: Path):
        def change(rank: int, step: int) -> dict[str, float]:
            return slow(0.02 if step < 900 else 0.04)(rank, step)

        (drop,) = [f for f in findings(noisy_run(tmp_path, 2, 1500, change)) if f.code == "throughput-drop"]
        assert abs((drop.step or 0) - 900) <= 4

    def test_it_is_not_over_before_the_pace_is_back(self, tmp_path: Path):
        found = only(noisy_run(tmp_path / "then", 2, 120, after(60, 0.4)))
        later = noisy_run(tmp_path / "later", 2, 700, after(60, 0.4))
        assert findings(later) == []
        assert not is_over(later.view(), found, 0, [])
        assert is_over(later.view(), found, 0, [replace(found, ranks=(1,))])
        torn = replace(found, evidence=({"what": "work a second", "unit": "steps", "before": "fast"},))
        assert is_over(later.view(), torn, 0, [])
        change = after(60, 0.4)
        back = noisy_run(tmp_path / "back", 2, 700, lambda r, step: (slow(0.5) if step > 600 else change)(r, step))
        assert is_over(back.view(), found, 0, [])

    @pytest.mark.parametrize(
        "change",
        [
            slow(0.5),
            lambda rank, step: slow(0.5 + 0.004 * step)(rank, step) | {"tokens": 1000 + 8 * step},  # longer inputs
            lambda rank, step: slow(1.0 if step >= 60 else 0.5)(rank, step) | {"tokens": 2048 if step >= 60 else 1024},
            lambda rank, step: slow(1.0 if 50 <= step < 80 else 0.5)(rank, step),  # it is over
            lambda rank, step: slow(1.5 if step % 10 == 0 else 0.5)(rank, step),  # every tenth step is long
            lambda rank, step: slow(2.0 if step < 8 else 0.5)(rank, step),  # warm-up
            lambda rank, step: slow(0.5 if step < 60 else 0.3)(rank, step),  # faster
            lambda rank, step: slow(0.5)(rank, step) | ({"validation": 5.0} if step >= 60 else {}),
        ],
    )
    def test_stays_quiet(self, tmp_path: Path, change: Change):
        assert [f for f in findings(noisy_run(tmp_path, 2, 120, change)) if f.code == "throughput-drop"] == []

    def test_noise_of_a_shared_machine(self, tmp_path: Path):
        for seed in range(12):
            random = np.random.default_rng(seed)
            load = np.abs(np.cumsum(random.normal(0, 0.01, 200)))  # wanders, as other people's work does
            change: Change = lambda rank, step, load=load: slow(0.3 + 0.1 * load[step])(rank, step)  # noqa: E731
            run = noisy_run(tmp_path / str(seed), 2, 200, change, seed=seed)
            assert findings(run) == []


class TestMemoryImbalance:
    @staticmethod
    def holding(root: Path, peaks: list[float], **options: object) -> FakeRun:
        run = FakeRun(root, len(peaks), **options)  # type: ignore[arg-type]
        for rank, peak in zip(run.ranks, peaks, strict=True):
            rank.page(device_total_bytes=80e9)
            for _ in range(30):
                rank.step(device_bytes=0.8 * peak, device_peak_bytes=peak)
        return run

    def test_fires(self, tmp_path: Path):
        found = only(self.holding(tmp_path, [40e9, 41e9, 60e9, 40e9]))
        assert (found.code, found.ranks) == ("memory-imbalance", (2,))

    @pytest.mark.parametrize("peaks", [[40e9, 41e9, 44e9], [1e9, 1e9, 2e9], [float("nan")] * 3])
    def test_stays_quiet(self, tmp_path: Path, peaks: list[float]):
        assert findings(self.holding(tmp_path, peaks)) == []

    @pytest.mark.parametrize(
        ("bytes_of", "accused"),
        [
            ([2e9, 2.1e9, 4.5e9], (2,)),
            ([2e9, 2.1e9, 2.9e9], ()),  # less than a GiB more
            ([50e9, 51e9, 56e9], ()),
            ([2e9, 2e9, float("nan")], ()),  # that rank has a device
        ],
    )
    def test_ranks_without_a_device_are_judged_by_what_they_hold_of_the_host(self, tmp_path, bytes_of, accused):
        run = FakeRun(tmp_path, len(bytes_of))
        for rank, held in zip(run.ranks, bytes_of, strict=True):
            for _ in range(30):
                rank.step(private_bytes=held)
        assert [(f.code, f.ranks) for f in findings(run)] == ([("memory-imbalance", accused)] if accused else [])

    def test_the_host_of_a_device_is_not_judged(self, tmp_path: Path):
        run = FakeRun(tmp_path, 3)
        for rank in run.ranks:
            for _ in range(30):
                rank.step(device_peak_bytes=40e9, private_bytes=2e9 if rank.number else 9e9)
        assert findings(run) == []

    def test_stages_are_not_compared(self, tmp_path: Path):
        run = self.holding(tmp_path, [60e9, 30e9], layout=None)
        for number, rank in enumerate(run.ranks):
            rank.meta("layout", kind="plain", data_ranks=[number], stage=number, dropout=0)
        assert findings(run) == []


class TestCauseOfAStraggler:
    @pytest.mark.parametrize(
        ("fields", "words", "cause"),
        [
            ({"forward": 0.4, "throttled_ns": 0.3e9}, "used up its processor time", "cpu-quota"),
            ({"forward": 0.4, "run_delay_ns": 0.3e9}, "other processes take its core", "no-core"),
            ({"forward": 0.4, "gc_ns": 0.3e9}, "Python collects garbage", "garbage"),
            ({"compile": 0.4}, "torch compiles for it again and again", "compiling"),
            ({"data": 0.4}, "it waits for its data", "input"),
            ({"forward": 0.4, "input_elements": 2048.0}, "its inputs are 2.00 times as large", "larger-inputs"),
            ({"forward": 0.4, "on_core_ns": 0.1e9, "cpu_ns": 0.1e9}, "it sleeps, reads or writes", "off-processor"),
            ({"forward": 0.4, "on_core_ns": 0.1e9, "cpu_ns": 0.4e9}, "hold the Python lock", "python-lock"),
            ({"forward": 0.4, "on_core_ns": 0.4e9, "cpu_ns": 0.4e9}, "", ""),
            ({"forward": 0.4, "on_core_ns": 0.1e9, "cpu_ns": 0.1e9, "device_marks": 4.0}, "", ""),
            ({"forward": 0.4}, "", ""),
        ],
    )
    def test_it_is_named(self, tmp_path: Path, fields: dict[str, float], words: str, cause: str):
        def change(rank: int, step: int) -> dict[str, float]:
            usual = {"input_elements": 1024.0}
            if "on_core_ns" in fields:
                usual |= {"on_core_ns": 0.05e9, "cpu_ns": 0.05e9}
            return usual | (fields if rank == 1 else {"exposed": 0.4})

        (found,) = [f for f in findings(noisy_run(tmp_path, 3, 40, change)) if f.code == "straggler"]
        assert found.ranks == (1,)
        assert words in found.summary
        assert [e["cause"] for e in found.evidence if e["what"] == "cause"] == ([cause] if cause else [])
