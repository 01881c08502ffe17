"""`dtobs trace`: times by construction, the straggler, clocks, damage, the merged file, the comparison."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtobs.cli import main
from dtobs.timeline.kineto import files
from dtobs.timeline.kineto.analyse import analyse
from tests.unit.timeline.kineto.traces import Host, group, host_ahead, jitter, job, pipeline, random_rank, save


def say(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    code = main(["trace", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def test_overlap_and_idle_by_construction(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    host = Host(0, 1)
    host.launch("gemm", 1000, 100, at=900)
    host.launch("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 1050, 150, at=950, stream=20)  # exposed 100
    host.launch("Memcpy DtoH (Device -> Pageable)", 1250, 50, at=1240, category="gpu_memcpy")  # 40 host, 10 launch
    host.add("cuda_runtime", "cudaStreamSynchronize", 1300, 60)
    host.add("cuda_runtime", "cudaMalloc", 1360, 30)
    host.launch("gemm", 1420, 10, at=1400)  # gap 120: 60 synchronisation, 30 allocation, 10 host, 20 launch
    host.launch("gemm", 1530, 10, at=1405)  # gap 100, launched before: other
    host.write(tmp_path / "a.json")
    code, found, _ = say(capsys, tmp_path)
    rank = found["ranks"]["0"]
    assert code == 0
    assert (rank["span_us"], rank["compute_us"], rank["communication_us"], rank["exposed_us"]) == (540, 120, 150, 100)
    assert rank["overlap_percent"] == pytest.approx(100 / 3, abs=1e-3)
    assert (rank["memory_us"], rank["idle_us"]) == (50, 270)
    assert rank["idle"] == {"host-bound": 50, "launch": 30, "synchronisation": 60, "allocation": 30, "other": 100}


@pytest.mark.parametrize("seed", range(4))
def test_overlap_against_a_raster_of_microseconds(seed: int, tmp_path: Path):
    """Four streams that overlap at random, counted microsecond by microsecond without any arithmetic of intervals."""
    host = random_rank(seed)
    busy = {kind: np.zeros(200_000, bool) for kind in ("compute", "communication", "memory")}
    for event in host.events:
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = "memory" if event["cat"] != "kernel" and "Mem" in event["name"] else "compute"
            kind = "communication" if event["cat"] == "kernel" and "nccl" in event["name"] else kind
            busy[kind][event["ts"] : event["ts"] + event["dur"]] = True
    compute, communication, memory = busy.values()
    whole = np.flatnonzero(compute | communication | memory)
    assert 0.1 < (compute & communication).sum() / communication.sum() < 0.9
    rank = analyse([host.write(tmp_path / "a.json")]).to_json()["ranks"]["0"]
    assert rank["span_us"] == whole[-1] + 1 - whole[0]
    assert (rank["compute_us"], rank["communication_us"]) == (compute.sum(), communication.sum())
    assert rank["exposed_us"] == (communication & ~compute).sum()
    assert rank["overlap_percent"] == pytest.approx(
        100 * (compute & communication).sum() / communication.sum(), abs=1e-3
    )
    assert rank["idle_us"] == rank["span_us"] - len(whole)


def test_no_communication_is_null_not_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    host = Host(0, 1)
    host.launch("gemm", 1000.25, 100.5, at=900)
    host.write(tmp_path / "a.json.gz")
    _, found, _ = say(capsys, tmp_path)
    rank = found["ranks"]["0"]
    assert (rank["exposed_us"], rank["overlap_percent"], rank["compute_us"]) == (None, None, 100.5)
    assert found["straggler"] is None


KINDS = [
    ({"work": lambda r, s: 16_000 if r == 2 else 10_000}, "device"),
    ({"idle": lambda r, s: 6_000 if r == 2 else 500}, "host-bound"),
    ({"idle": lambda r, s: 6_000 if r == 2 else 500, "loading": True}, "input"),
]


@pytest.mark.parametrize(("slow", "kind"), KINDS, ids=[k for _, k in KINDS])
@pytest.mark.parametrize("world", [3, 8])
def test_the_straggler_and_its_kind(
    slow: dict[str, Any], kind: str, world: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    hosts = job(world, **slow, clock=lambda r: r * 7_000_000, late_profiler=lambda r: r % 3)
    code, found, _ = say(capsys, save(hosts, tmp_path, "{}_host.pt.trace.json.gz"))
    accused = found["straggler"]
    assert (code, accused["rank"], accused["kind"], accused["confidence"]) == (3, 2, kind, "certain")
    assert [f["code"] for f in found["findings"]] == ["straggler"]
    late = 6_000 if kind == "device" else 5_500
    assert accused["cost_us"] == pytest.approx(late * (world - 1) * 6, rel=0.01)  # the last six calls are common


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("steps", [3, 5, 40])
def test_jitter_accuses_nobody(world: int, steps: int, tmp_path: Path):
    for seed in range(12):
        folder = save(job(world, steps, work=jitter(seed)), tmp_path / str(seed))
        assert analyse([folder]).straggler is None, seed


def test_one_late_step_accuses_nobody(tmp_path: Path):
    hosts = job(4, 10, work=lambda r, s: 200_000 if (r, s) == (1, 4) else 10_000)
    assert analyse([save(hosts, tmp_path)]).straggler is None


def test_a_missing_file_takes_the_certainty(tmp_path: Path):
    hosts = job(4, work=lambda r, s: 16_000 if r == 2 else 10_000)
    del hosts[0]
    found = analyse([save(hosts, tmp_path)]).straggler
    assert found is not None and (found.rank, found.confidence) == (2, "likely")


@pytest.mark.parametrize("kept", [(0, 1, 3), (2,), (0,)], ids=["late one missing", "only the late one", "only another"])
def test_nobody_is_accused_without_evidence(kept: tuple[int, ...], tmp_path: Path):
    hosts = job(4, work=lambda r, s: 16_000 if r == 2 else 10_000)
    found = analyse([save({r: hosts[r] for r in kept}, tmp_path)])
    assert found.straggler is None
    assert len(kept) > 1 or "needs the traces of the others" in " ".join(found.notes)


@pytest.mark.parametrize("slow", [None, 2])
def test_hosts_that_run_ahead_of_their_devices(slow: int | None, tmp_path: Path):
    found = analyse([save(host_ahead(slow=slow), tmp_path)]).straggler
    assert (found and (found.rank, found.kind)) == (None if slow is None else (slow, "device"))


PIPELINES: tuple[tuple[str, dict[str, Any], tuple[int, str] | None], ...] = (
    *((f"healthy {stages}x{replicas} {peers}", {"stages": stages, "replicas": replicas, "peers": peers}, None)
      for stages in (2, 4) for replicas in (1, 2) for peers in (True, False)),
    ("a slow rank among replicas", {"replicas": 2, "work": lambda r: 1.5 if r == 5 else 1}, (5, "likely")),
    ("it, messages unnamed", {"replicas": 2, "peers": False, "work": lambda r: 1.5 if r == 2 else 1}, (2, "likely")),
    ("a long stage, in all replicas", {"replicas": 2, "work": lambda r: 1.5 if r % 4 == 1 else 1}, None),
    ("a rank or its stage", {"work": lambda r: 1.5 if r == 3 else 1}, (3, "possible")),
    ("the first of two", {"stages": 2, "work": lambda r: 1.5 if r == 0 else 1}, (0, "possible")),
    *((f"healthy, early receives, {replicas} {peers}", {"replicas": replicas, "peers": peers, "eager": True}, None)
      for replicas in (1, 2) for peers in (True, False)),
    ("healthy, long messages, of which stages amid the pipeline have more", {"transfer": 1200}, None),
    ("a slow rank, early receives",
     {"replicas": 2, "work": lambda r: 1.5 if r == 4 else 1, "eager": True}, (4, "likely")),
    ("a long stage, early receives",
     {"replicas": 2, "work": lambda r: 1.5 if r % 4 == 1 else 1, "eager": True}, None),
    ("a slow host among replicas", {"replicas": 2, "pause": lambda r: 2000 * (r == 5)}, (5, "likely")),
    ("the hosts of a stage", {"replicas": 2, "pause": lambda r: 2000 * (r % 4 == 1)}, None),
    ("hosts that are all slow", {"replicas": 2, "pause": lambda r: 2000}, None),
    ("a slow host, or its stage", {"pause": lambda r: 2000 * (r == 2)}, (2, "possible")),
)  # fmt: skip


@pytest.mark.parametrize(("form", "accused"), [p[1:] for p in PIPELINES], ids=[p[0] for p in PIPELINES])
def test_pipelines_wait_in_their_order(form: dict[str, Any], accused: tuple[int, str] | None, tmp_path: Path):
    found = analyse([save(pipeline(**form), tmp_path)]).straggler
    if accused is None:
        assert found is None
    else:
        assert found is not None and (found.rank, found.kind) == (
            accused[0],
            "host-bound" if "pause" in form else "device",
        )
        assert found.confidence.value in (accused[1], "certain")[: 1 + (accused[1] == "likely")]


def test_who_is_late_because_it_waited_elsewhere_is_not_accused(tmp_path: Path):
    """Ranks 0 and 1 reduce, then 1 and 2, every step: 0 is slow, and 1 is late for 2 because of it."""
    hosts = {r: Host(r, 3) for r in range(3)}
    now = 1000
    for step in range(12):
        for r, host in hosts.items():
            host.add("user_annotation", f"ProfilerStep#{step}", now, 9000)
            host.launch("gemm", now + 10, 5000 if r == 0 else 1000, at=now)
        first, second = (
            {**group(2, name), "Process Group Ranks": ranks} for name, ranks in (("a", "[0, 1]"), ("b", "[1, 2]"))
        )
        hosts[0].launch("ncclDevKernel_AllReduce", now + 5010, 500, now, 20, **first)
        hosts[1].launch("ncclDevKernel_AllReduce", now + 1010, 4500, now, 20, **first)
        hosts[1].launch("ncclDevKernel_AllReduce", now + 5510, 500, now, 24, **second)
        hosts[2].launch("ncclDevKernel_AllReduce", now + 1010, 5000, now, 20, **second)
        now += 7000
    found = analyse([save(hosts, tmp_path)]).straggler
    assert found is not None and found.rank == 0


def test_transfers_of_a_rank_whose_partner_is_missing_are_no_waits(tmp_path: Path):
    """Tensor groups of two, whose transfers take longer than all else, by data groups of two; no rank is slow."""
    hosts = {r: Host(r, 4) for r in range(4)}
    now = 1000
    for step in range(10):
        for r, host in hosts.items():
            host.add("user_annotation", f"ProfilerStep#{step}", now, 9000)
            host.launch("gemm", now + 10, 1000 + 13 * ((r + step) % 4), at=now)
            for begin, took, name, ranks in (
                (now + 1060, 5000, f"tp{r // 2}", [r // 2 * 2, r // 2 * 2 + 1]),
                (now + 6100, 500, f"dp{r % 2}", [r % 2, r % 2 + 2]),
            ):
                args = {**group(2, name), "Process Group Ranks": str(ranks)}
                late = (r + step) % 4
                host.launch("ncclDevKernel_AllReduce", begin + late, took - late, now, 20, **args)
        now += 7000
    for missing in range(4):
        folder = save({r: h for r, h in hosts.items() if r != missing}, tmp_path / str(missing))
        assert analyse([folder]).straggler is None


NAMES = [
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", {"x": 1}, "all_reduce"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", {"x": 1}, "reduce_scatter"),
    ("void deep_ep::intranode::dispatch<8, 768, 4096>(int4*)", {"x": 1}, "dispatch"),
    ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", {"Collective name": "_allgather_base"}, "all_gather"),
]


@pytest.mark.parametrize(("kernel", "args", "op"), NAMES, ids=[op for _, _, op in NAMES])
def test_names_of_kernels(kernel: str, args: dict[str, Any], op: str, tmp_path: Path):
    found = analyse([save(job(2, kernel=kernel, **args), tmp_path)])
    assert [c.op for c in found.collectives] == [op]
    assert all(f.communication > 0 for f in found.figures.values())


def test_a_generic_kernel_has_its_kind_from_the_record_that_launched_it(tmp_path: Path):
    host = Host(0, 2)
    host.add("cpu_op", "record_param_comms", 900, 50, **{**group(2), "Collective name": "reduce_scatter"})
    host.launch("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", 1000, 100, at=910)
    found = analyse([host.write(tmp_path / "a.json")])
    assert [(c.op, c.size, c.by_rank[0][1]) for c in found.collectives] == [("reduce_scatter", 2, 4000)]


def test_bandwidth_without_the_waits(tmp_path: Path):
    hosts = job(4, work=lambda r, s: 16_000 if r == 2 else 10_000, **group(4, **{"In msg nelems": 10**6}))
    call = analyse([save(hosts, tmp_path)]).collectives[0]
    assert call.transfer == 8 * 1000  # 4 MB in 1 ms
    assert call.algbw == pytest.approx(4.0)
    assert call.wait == 8 * 3 * 6000


def test_steps_are_what_was_launched_before_the_last_began(tmp_path: Path):
    hosts = job(2, steps=4)
    whole, steps = (analyse([save(hosts, tmp_path)], w).figures[0] for w in ("whole", "steps"))
    assert (whole.compute, steps.compute) == (40_000, 30_000)
    assert (whole.steps, steps.steps) == (4, 3)


@pytest.mark.parametrize("cut", [0.999, 0.7, 0.3])
@pytest.mark.parametrize("name", ["rank1.json", "rank1.json.gz"])
def test_a_torn_file_gives_a_line_and_what_could_be_read(
    cut: float, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    hosts = job(2, steps=200)
    hosts[0].write(tmp_path / "rank0.json")
    path = hosts[1].write(tmp_path / name)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    code, found, err = say(capsys, tmp_path)
    assert code == 0
    assert 0 < found["ranks"]["1"]["span_us"] <= found["ranks"]["0"]["span_us"]
    assert err.count("\n") == 1 and "cut off" in err


HOSTILE = [
    b"{",
    b"[",
    b"null",
    b'{"traceEvents": 7}',
    b'{"traceEvents": [' + b"[" * 100_000,
    b'{"traceEvents": [{"ph":"X","cat":"kernel","name":"a","ts":NaN,"dur":1}]}',
    b'{"traceEvents": [{"ph":"X","cat":"kernel","name":"a","ts":1e999,"dur":-1,"args":[]}]}',
    b'{"traceEvents": [{"ph":"X","cat":"kernel","name":"a","ts":-1e308,"dur":1e308}]}',
    b'{"traceEvents": [{"ph":"X","cat":["kernel"],"name":{},"ts":"x","dur":null}, 1, null, "x"]}',
    b"\x1f\x8b\x08garbage",
    b"\x80\x04\x95pickle",
    b"",
]


@pytest.mark.parametrize("data", HOSTILE)
def test_hostile_files_give_one_line(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "x.json"
    path.write_bytes(data)
    code, found, err = say(capsys, path)
    assert (code, found) == (1, {})
    assert err.count("\n") == 1 and "Traceback" not in err


def test_values_that_are_no_numbers_cost_only_their_event(tmp_path: Path):
    path = tmp_path / "x.json"
    good = '{"ph":"X","cat":"kernel","name":"gemm","ts":5,"dur":3,"pid":0,"tid":7,"args":{"stream":7,"x":NaN}}'
    odd = '{"ph":"X","cat":"kernel","name":"gemm","ts":"5","dur":' + "9" * 400 + "}"
    path.write_text('{"traceEvents": [' + ",".join([good, odd, good]) + "]}")
    assert analyse([path]).figures[0].compute == 3


def test_strings_that_look_like_the_end_of_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dtobs.timeline.kineto.stream.BLOCK", 97)
    host = random_rank(1)
    for number, event in enumerate(host.events):
        event["args"]["note"] = ['"}, {', "}]}, {", '\\"}, {"ph": "X"}'][number % 3]
        event["args"]["nested"] = [{"a": {}}, {"b": [{}, {}]}]
    host.meta["tail"] = {"traceEvents": []}
    one = analyse([host.write(tmp_path / "a.json")]).figures[0]
    monkeypatch.undo()
    assert one == analyse([tmp_path / "a.json"]).figures[0]
    assert len(host.events) == 804


def test_the_same_in_any_order_and_under_any_name(tmp_path: Path):
    hosts = job(3, work=lambda r, s: 16_000 if r == 2 else 10_000)
    for name in ("rank{}.json", "x{}", "{}.pt.trace.json.gz"):
        folder = save(hosts, tmp_path / name.format("-"), name)
        (folder / "run.json").write_text('{"name": "a run"}')
        files = sorted(folder.glob("*[012]*"), reverse=True)
        assert analyse([folder]).to_json()["straggler"] == analyse(files).to_json()["straggler"] != None  # noqa: E711


@pytest.mark.parametrize("threads", [0, 1])
def test_the_same_in_one_process_and_in_several(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(job(3, 2, slow=1), tmp_path)
    alone = analyse([tmp_path]).to_json()
    monkeypatch.setattr(files, "WORTH_A_PROCESS", 0)
    monkeypatch.setattr(files.os, "cpu_count", lambda: 2)
    done = threading.Event()
    others = [threading.Thread(target=done.wait) for _ in range(threads)]
    for other in others:
        other.start()
    try:
        assert analyse([tmp_path]).to_json() == alone
    finally:
        done.set()
        for other in others:
            other.join()


def test_ranks_from_names_where_files_do_not_say(tmp_path: Path):
    hosts = job(2)
    for rank, host in hosts.items():
        host.meta = {}
        host.write(tmp_path / f"trace_rank-{rank + 4}.json")
    assert list(analyse([tmp_path]).figures) == [4, 5]


def test_the_merged_file_nests_and_has_one_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    hosts = job(3, work=lambda r, s: 16_000 if r == 2 else 10_000, clock=lambda r: -r * 3_000_000)
    hosts[0].events += random_rank(3).events
    code, _, _ = say(capsys, save(hosts, tmp_path), "-o", tmp_path / "m.json.gz", "--html", tmp_path / "m.html")
    assert code == 3
    merged = json.loads(gzip.decompress((tmp_path / "m.json.gz").read_bytes()))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in merged if e["name"] == "thread_name"}
    ends: dict[tuple[int, int], float] = {}
    for event in (e for e in merged if e["ph"] == "X"):
        place = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(place, 0.0) - 1e-6, names[place]
        ends[place] = event["ts"] + event["dur"]
    assert {n.split()[0] for n in names.values()} == {"steps", "compute", "memory", "wait", "communication"}
    last = {e["pid"]: e["ts"] + e["dur"] for e in merged if e["ph"] == "X" and "DevKernel_AllReduce" in e["name"]}
    assert last[1] == pytest.approx(last[2], abs=1)
    assert "makes the others wait" in (tmp_path / "m.html").read_text()


COMPARED = [(10_000, 8_000, "better"), (10_000, 12_000, "worse"), (10_000, 10_050, "same")]


@pytest.mark.parametrize("annotated", [True, False])
@pytest.mark.parametrize(("a", "b", "verdict"), COMPARED)
def test_compare(a: int, b: int, verdict: str, annotated: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    jobs = job(2, steps=6, work=lambda r, s: a), job(2, steps=9, work=lambda r, s: b)
    for host in (*jobs[0].values(), *jobs[1].values()) if not annotated else ():
        host.events = [e for e in host.events if not e["name"].startswith("ProfilerStep")]
    one, two = save(jobs[0], tmp_path / "a"), save(jobs[1], tmp_path / "b")
    code, found, _ = say(capsys, "--compare", one, two)
    assert (code, found["schema"], found["verdict"]) == (0, "dtobs.trace-compare/1", verdict)
    assert found["ranks"]["0"]["compute_us"] == {"a": 6.0 * a, "b": 9.0 * b}
    assert main(["trace", "--compare", str(one), str(two)]) == 0
    assert capsys.readouterr().out.startswith(verdict)


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["a", "--compare", "a", "b"], ["a", "-o", "x.txt"]):
        assert main(["trace", *arguments]) == 2
    assert main(["trace", str(tmp_path / "nothing")]) == 1
    assert "there is no such file" in capsys.readouterr().err


def test_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = save(job(2, work=lambda r, s: 16_000 if r == 1 else 10_000), tmp_path)
    assert main(["trace", str(folder)]) == 3
    out = capsys.readouterr().out
    assert out.startswith(
        "warning, certain: rank 1 makes the others wait: it comes 6 ms late to its collectives, summed over the median"
        " step"
    )
    assert "all_reduce" in out and "ampere_sgemm" in out
