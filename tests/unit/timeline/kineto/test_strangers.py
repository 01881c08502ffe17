"""Traces as other people's jobs write them: names, groups, clocks, files and damage of many kinds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dtobs.errors import TargetError
from dtobs.reports.trace_text import render
from dtobs.timeline.kineto.analyse import JobTrace, analyse
from dtobs.timeline.kineto.names import KernelKind, kernel_kind, operation
from tests.unit.timeline.kineto.traces import Host, group, jitter, job, save

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

KERNELS: tuple[tuple[str, KernelKind, str], ...] = (
    ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", KernelKind.COMMUNICATION, "all_reduce"),
    ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWorkElem)", KernelKind.COMMUNICATION, "reduce_scatter"),
    (
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        KernelKind.COMMUNICATION,
        "send_recv",
    ),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", KernelKind.COMMUNICATION, "all_gather"),
    ("ncclSymDevKernel_AllReduce_AGxLLMC_R_sum_bf16(ncclSymDevArgs)", KernelKind.COMMUNICATION, "all_reduce"),
    ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", KernelKind.COMMUNICATION, ""),
    ("void deep_ep::intranode::dispatch<8, 768>(int4*, float*, int*, long*)", KernelKind.COMMUNICATION, "dispatch"),
    ("void deep_ep::internode_ll::combine<false, 7168, 11>(void*, void*)", KernelKind.COMMUNICATION, "combine"),
    ("void deep_ep::intranode::cached_notify_combine<8>(void**, int*, int)", KernelKind.COMMUNICATION, "combine"),
    (
        "void primus_turbo::deep_ep::internode::notify_dispatch<true, 4>(int const*)",
        KernelKind.COMMUNICATION,
        "dispatch",
    ),
    ("void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)", KernelKind.COMPUTE, ""),
    (
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, int)",
        KernelKind.COMMUNICATION,
        "all_reduce",
    ),
    (
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
        KernelKind.COMMUNICATION,
        "all_reduce",
    ),
    ("void c10d::symmetric_memory::two_shot_all_reduce_kernel<float>(float**)", KernelKind.COMMUNICATION, "all_reduce"),
    ("void nvshmemi_transfer_rma_nbi<3>(void*)", KernelKind.COMMUNICATION, ""),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)", KernelKind.COMPUTE, ""),
    ("void my::fused<ncclDataType_t>(float*)", KernelKind.COMPUTE, ""),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<int>(int)", KernelKind.COMPUTE, ""),
    ("sm90_xmma_gemm_bf16bf16_dispatch_tn", KernelKind.COMPUTE, ""),
    ("Memcpy PtoP (Device -> Device)", KernelKind.MEMORY, ""),
    ("__amd_rocclr_copyBuffer.kd", KernelKind.MEMORY, ""),
)


@pytest.mark.parametrize(("name", "kind", "op"), KERNELS, ids=[n.split("(")[0][-50:] or n[:40] for n, _, _ in KERNELS])
def test_kernels_by_name(name: str, kind: KernelKind, op: str):
    assert kernel_kind(name) == kind
    if kind == KernelKind.COMMUNICATION:
        assert operation(name) == op


def two_groups(steps: int = 10, slow: int = -1, **meta: Any) -> dict[int, Host]:
    """Four ranks, two by two: tensor groups {0,1}, {2,3}, data groups {0,2}, {1,3}; `slow` computes 40 % longer."""
    hosts = {r: Host(r, 4, **meta) for r in range(4)}
    free = dict.fromkeys(hosts, 1_000_000)
    for step in range(steps):
        for host in hosts.values():
            host.add("user_annotation", f"ProfilerStep#{step}", free[host.rank], 1)
        for name, groups in (("tp", ((0, 1), (2, 3))), ("dp", ((0, 2), (1, 3)))):
            for ranks in groups:
                work = {r: (14_000 if r == slow else 10_000) if name == "tp" else 1_000 for r in ranks}
                end = max(free[r] + work[r] for r in ranks) + 500
                for r in ranks:
                    begin = free[r] + 50
                    hosts[r].launch("sm90_xmma_gemm", begin, work[r] - 50, begin - 30)
                    more = {"Group size": 2, "Process Group Ranks": str(list(ranks))}
                    args = group(4, name) | more
                    hosts[r].launch(NCCL, free[r] + work[r], end - free[r] - work[r], begin - 20, stream=20, **args)
                    free[r] = end
    return hosts


def test_several_groups_of_one_name_stay_apart(tmp_path: Path):
    found = analyse([save(two_groups(slow=2), tmp_path)])
    groups = sorted((c.group, c.ranks) for c in found.collectives)
    assert groups == [("dp", (0, 2)), ("dp", (1, 3)), ("tp", (0, 1)), ("tp", (2, 3))]
    assert found.straggler is not None and found.straggler.rank == 2 and found.straggler.kind == "device"


def test_several_groups_without_a_slow_rank(tmp_path: Path):
    assert analyse([save(two_groups(), tmp_path)]).straggler is None


@pytest.mark.parametrize("apart", [0, 30_000, 5_000_000, -3_600_000_000])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_clocks_and_profilers_apart(apart: int, late: int, tmp_path: Path):
    hosts = job(4, 12, lambda r, s: 14_000 if r == 1 else 10_000, clock=lambda r: r * apart,
                late_profiler=lambda r: late if r == 3 else 0)  # fmt: skip
    found = analyse([save(hosts, tmp_path)])
    assert found.straggler is not None and (found.straggler.rank, found.straggler.kind) == (1, "device")
    for matched in found.matched.groups:
        assert float((matched.end.max(axis=0) - matched.end.min(axis=0)).max()) < 1.0


@pytest.mark.parametrize("apart", [30_000, 5_000_000])
def test_clocks_apart_accuse_nobody(apart: int, tmp_path: Path):
    hosts = job(4, 12, jitter(3), clock=lambda r: r * apart, late_profiler=lambda r: r)
    assert analyse([save(hosts, tmp_path)]).straggler is None


@pytest.mark.parametrize("gone", [0, 2, 3])
def test_without_one_file(gone: int, tmp_path: Path):
    hosts = job(4, 12, lambda r, s: 16_000 if r == 2 else 10_000)
    del hosts[gone]
    found = analyse([save(hosts, tmp_path, "host-a_{}.1754.pt.trace.json")])
    assert set(found.figures) == set(hosts)
    if gone == 2:
        assert found.straggler is None
    else:
        assert found.straggler is not None and found.straggler.rank == 2
        assert found.straggler.confidence.value != "certain"


def test_one_rank_says_that_more_are_needed(tmp_path: Path):
    found = analyse([save({1: job(4)[1]}, tmp_path)])
    assert found.straggler is None and any("needs the traces of the others" in n for n in found.notes)


def test_events_without_arguments(tmp_path: Path):
    hosts = job(2, 6)
    for host in hosts.values():
        for event in host.events:
            event.pop("args")
    found = analyse([save(hosts, tmp_path)])
    assert found.figures[0].communication > 0 and found.figures[0].compute > 0
    assert [c.op for c in found.collectives] == ["all_reduce"]


def test_numbers_as_text_and_nonsense_beside_good_events(tmp_path: Path):
    host = job(1, 4)[0]
    host.events[1:1] = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "abc", "dur": 5},
        {"ph": "X", "cat": "kernel", "name": None, "ts": 1, "dur": 5},
        {"ph": "X", "cat": ["kernel"], "name": "k", "ts": 1, "dur": 5},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1e300, "dur": 5},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1_000_300, "dur": -5},
        {"ph": "i", "cat": "kernel", "name": "k", "ts": 1, "dur": 5},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1_000_200, "dur": 5, "pid": [], "args": {"stream": {}}},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1_000_200, "dur": 5, "args": {"correlation": "x" * 30}},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1_000_200, "dur": 5, "args": {"correlation": 1 << 80}},
    ]
    for event in host.events[12:]:
        event["ts"], event["dur"] = str(event["ts"]), str(event["dur"])
    plain = analyse([save(job(1, 4), tmp_path / "plain")]).figures[0]
    found = analyse([save({0: host}, tmp_path / "odd")]).figures[0]
    assert (found.span, found.communication) == (plain.span, plain.communication)


def test_memory_is_neither_compute_nor_idle(tmp_path: Path):
    host = Host(0, 1)
    host.launch("gemm", 0, 100, -50)
    host.launch("Memcpy HtoD (Pinned -> Device)", 100, 50, -40, category="gpu_memcpy")
    host.launch("Memset (Device)", 140, 60, -30, stream=8, category="gpu_memset")
    host.launch("gemm", 300, 100, 10)
    found = analyse([save({0: host}, tmp_path)]).figures[0]
    assert (found.span, found.compute, found.memory, found.idle) == (400, 200, 100, 100)
    assert found.exposed is None and found.overlap_percent is None


def test_files_that_hold_nothing_beside_good_ones(tmp_path: Path):
    save(job(2, 6), tmp_path, "worker{}.pt.trace.json.gz")
    (tmp_path / "worker2.json").write_bytes(b"")
    (tmp_path / "worker3.json.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "README.md").write_text("nothing to see")
    (tmp_path / "settings.json").write_text('{"a": 1}')
    one = {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": 7, "pid": 0, "tid": 7}]}
    (tmp_path / "rank9.json").write_text(json.dumps(one | {"distributedInfo": {"rank": 9}}))
    found = analyse([tmp_path])
    assert set(found.figures) == {0, 1, 9} and found.figures[9].span == 7
    assert sum("worker3" in n for n in found.notes) == 1


@pytest.mark.parametrize(
    "data",
    [b"", gzip.compress(b""), gzip.compress(b'{"traceEvents": []}'), b"[]"],
    ids=["empty", "packed nothing", "no events", "a list"],
)
def test_a_folder_with_nothing_in_it_is_refused_in_a_line(data: bytes, tmp_path: Path):
    (tmp_path / "rank0.json.gz").write_bytes(data)
    with pytest.raises(TargetError):
        analyse([tmp_path])


def test_gloo_without_a_device(tmp_path: Path):
    hosts = {r: Host(r, 2) for r in range(2)}
    for step in range(6):
        at = step * 20_000
        for r, host in hosts.items():
            late = 6_000 * r
            host.add("cpu_op", "aten::mm", at, 5_000 + late)
            host.events[-1]["tid"] = 1
            host.add("user_annotation", "gloo:all_reduce", at + 5_000 + late, 9_000 - late, **group(2))
            host.events[-1]["tid"] = 2
    found = analyse([save(hosts, tmp_path)])
    assert all(f.host_only for f in found.figures.values())
    assert found.figures[0].communication == 6 * 9_000 and found.figures[1].communication == 6 * 3_000
    assert found.straggler is not None and found.straggler.rank == 1


def test_a_record_on_another_id_is_found_by_time(tmp_path: Path):
    """RCCL's generic kernel names no operation, and no External id leads to the record: the launch lies inside it."""
    host = Host(0, 2)
    for step in range(4):
        at = step * 1_000
        host.add("cpu_op", "record_param_comms", at, 50, **(group(2) | {"Collective name": "_allgather_base"}))
        host.launch("ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", at + 100, 200, at + 20)
        host.launch("gemm", at + 400, 100, at + 60)
    found = analyse([save({0: host}, tmp_path)])
    assert [(c.op, c.by_rank[0][0]) for c in found.collectives] == [("all_gather", 4)]


def test_the_json_holds_its_contract(tmp_path: Path):
    document = analyse([save(two_groups(slow=2), tmp_path)]).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["schema"] == "dtobs.trace/1" and list(document["ranks"]) == ["0", "1", "2", "3"]
    for figures in document["ranks"].values():
        assert abs(sum(figures["idle"].values()) - figures["idle_us"]) < 0.01
        assert figures["compute_us"] + figures["exposed_us"] + figures["idle_us"] == figures["span_us"]
    assert set(document["straggler"]) == {"rank", "cost_us", "kind", "confidence"}
    assert [f["code"] for f in document["findings"]] == ["straggler"]


def slowest(found: JobTrace) -> tuple[int, str] | None:
    return found.straggler and (found.straggler.rank, found.straggler.kind)


def test_the_same_verdict_in_both_windows(tmp_path: Path):
    folder = save(two_groups(20, slow=1), tmp_path)
    assert slowest(analyse([folder])) == slowest(analyse([folder], "steps")) == (1, "device")


def test_annotations_of_a_stream_are_labels_not_work(tmp_path: Path):
    host = Host(0, 1)
    host.launch("gemm", 0, 100, -50)
    host.launch("gemm", 300, 100, 10)
    host.add("gpu_user_annotation", "forward", 0, 400, stream=7)
    host.add("cuda_sync", "Stream Sync", 100, 250, stream=7)
    found = analyse([save({0: host}, tmp_path)]).figures[0]
    assert (found.span, found.compute, found.idle) == (400, 200, 200)


def test_collectives_name_their_ranks(tmp_path: Path):
    shown = render(analyse([save(two_groups(), tmp_path)]))
    assert all(f" {ranks} " in shown for ranks in ("0 and 1", "2 and 3", "0 and 2", "1 and 3"))
