"""Traces of other devices, engines, tools and profilers' settings than `test_strangers` has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtobs.timeline.kineto.analyse import JobTrace, analyse
from dtobs.timeline.kineto.names import KernelKind, kernel_kind, operation
from tests.unit.timeline.kineto.traces import Host, group, job, save


def straight(found: JobTrace, rank: int = 0) -> tuple[float, ...]:
    """Span, compute, communication, exposed, memory and idle time of a rank."""
    f = found.figures[rank]
    return (f.span, f.compute, f.communication, f.exposed or 0.0, f.memory, f.idle)


KERNELS: tuple[tuple[str, KernelKind, str], ...] = (
    ("hcom_allReduce__428_0_1", KernelKind.COMMUNICATION, "all_reduce"),
    ("hcom_allGather__123_4_1", KernelKind.COMMUNICATION, "all_gather"),
    ("hcom_reduceScatter__9_2_1", KernelKind.COMMUNICATION, "reduce_scatter"),
    ("HcclLaunchAicpuKernel", KernelKind.COMMUNICATION, ""),
    ("mcclKernel_AllReduce_RING_LL_Sum_float(mcclWorkElem)", KernelKind.COMMUNICATION, "all_reduce"),
    ("void cnclKernel_AllGather<float>(void*)", KernelKind.COMMUNICATION, "all_gather"),
    ("aclnnMatmul_MatMulCommon_MatMulV2", KernelKind.COMPUTE, ""),
    ("gemm_kernel[SIMD32 {512; 1; 1} {32; 1; 1}]", KernelKind.COMPUTE, ""),
    ("void oneccl_allreduce_ring_kernel<sycl::half>(void*)", KernelKind.COMMUNICATION, "all_reduce"),
    ("rccl_main_kernel", KernelKind.COMMUNICATION, ""),
    ("triton_poi_fused_add_all_gather_0", KernelKind.COMPUTE, ""),
    ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>(int)",
     KernelKind.COMMUNICATION, "all_reduce"),
    ("void sglang::cross_device_reduce_2stage<__half, 4>(RankData*, int)", KernelKind.COMMUNICATION, "all_reduce"),
    ("_ZN7deep_ep9intranode8dispatchILi8ELi768EEEvPvPfPi", KernelKind.COMMUNICATION, "dispatch"),
    ("_ZN7deep_ep6layout19get_dispatch_layoutILi256EEEvPKl", KernelKind.COMPUTE, ""),
    ("_Z23ncclDevKernel_Generic_424ncclDevKernelArgsStorageILm4096EE", KernelKind.COMMUNICATION, ""),
    ("_ZN4vllm26cross_device_reduce_2stageI6__halfLi8EEEvP8RankData", KernelKind.COMMUNICATION, "all_reduce"),
    ("_ZN12_GLOBAL__N_121one_shot_all_reduce_kEPf", KernelKind.COMMUNICATION, "all_reduce"),
    ("_Z9my_kernel11ncclDevComm", KernelKind.COMPUTE, ""),
    ("_ZN2at6native13reduce_kernelILi512EEEvT_", KernelKind.COMPUTE, ""),
    ("void vllm::act_and_mul_kernel<c10::BFloat16>(c10::BFloat16*)", KernelKind.COMPUTE, ""),
)  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "op"), KERNELS, ids=[n.split("(")[0][:45] for n, _, _ in KERNELS])
def test_kernels_of_other_devices_and_engines_by_name(name: str, kind: KernelKind, op: str):
    assert kernel_kind(name) == kind
    if kind == KernelKind.COMMUNICATION:
        assert operation(name) == op


def test_python_functions_and_annotations_of_engines_change_no_figure(tmp_path: Path):
    plain, hosts = job(2, 6), job(2, 6)
    for host in hosts.values():
        begin, end = host.events[0]["ts"], host.events[-1]["ts"]
        for name in ("torch/nn/modules/module.py(1780): _call_impl", "<built-in method linear of type object>"):
            more = {"Python id": 1, "Python parent id": None, "Python module id": 0}
            host.add("python_function", name, begin - 1000, end - begin, **more)
        for name in ("execute_context_0(0)_generation_8(8)", "forward_step", "DeepSpeedEngine.allreduce_gradients"):
            host.add("user_annotation", name, begin, 500)
            host.add("gpu_user_annotation", name, begin, 50_000, stream=7)
        host.add("gpu_user_annotation", "nccl:all_reduce", begin, 50_000, stream=20)
        host.add("Trace", "PyTorch Profiler (0)", begin - 1000, end - begin)
        host.events += [
            {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": begin, "args": {"Addr": 1, "Bytes": 8}},
            {"ph": "s", "id": 7, "pid": 1, "tid": 1, "ts": begin, "cat": "ac2g", "name": "ac2g"},
            {"ph": "f", "id": 7, "pid": 0, "tid": 7, "ts": begin + 5, "cat": "ac2g", "name": "ac2g", "bp": "e"},
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": 7, "ts": begin, "args": {"sort_index": 7}},
            {
                "name": "Iteration Start: PyTorch Profiler",
                "ph": "i",
                "s": "g",
                "pid": "Traces",
                "tid": "Trace",
                "ts": 1,
            },
        ]
    before, after = (analyse([save(h, tmp_path / n)]) for h, n in ((plain, "plain"), (hosts, "more")))
    assert [straight(after, r) for r in (0, 1)] == [straight(before, r) for r in (0, 1)]
    assert after.straggler is None


def test_the_kernels_of_a_cuda_graph_have_one_launch(tmp_path: Path):
    host = Host(0, 1)
    for replay in range(3):
        at = replay * 1_000
        host.correlation += 1
        host.add("cuda_runtime", "cudaGraphLaunch", at, 20, correlation=host.correlation)
        for number in range(5):
            args = {"correlation": host.correlation, "graph node id": number + 1}
            host.add("kernel", "gemm", at + 100 + 102 * number, 100, stream=7, **args)
    found = analyse([save({0: host}, tmp_path)]).figures[0]
    assert (found.span, found.compute) == (2_000 + 4 * 102 + 100, 1_500)
    assert found.idle == found.span - 1_500 and sum(found.idle_by.values()) == found.idle
    # Between two kernels of a graph 2 µs; from the end of one graph to the launch of the next the host is late.
    assert found.idle_by["launch"] == 3 * 4 * 2 + 2 * 100
    assert found.idle_by["host-bound"] == found.idle - found.idle_by["launch"]


def test_several_devices_of_one_process_are_said(tmp_path: Path):
    host = Host(0, 1)
    host.launch("gemm", 0, 100, -50)
    host.launch("gemm", 50, 100, -40)
    host.events[-1]["pid"] = 1
    found = analyse([save({0: host}, tmp_path)])
    assert any("2 devices" in note for note in found.notes)
    assert not any("devices" in note for note in analyse([save(job(2, 6), tmp_path / "usual")]).notes)


def test_a_schedule_that_repeats_leaves_several_files_of_a_rank(tmp_path: Path):
    """`schedule(repeat=2)` with `tensorboard_trace_handler`: the newest of each rank is read, and the others named."""
    for repeat, steps in enumerate((6, 9)):
        hosts = job(2, steps, clock=lambda r, repeat=repeat: repeat * 60_000_000)
        save(hosts, tmp_path, f"node-7.example_{{}}.17{repeat}0000000000.pt.trace.json")
    found = analyse([tmp_path])
    assert [found.figures[r].steps for r in (0, 1)] == [9, 9]
    assert sum("left out" in note for note in found.notes) == 2


@pytest.mark.parametrize(
    "name",
    [
        "läuft heute {}.json",
        "trace({}) (copy).json",
        "-{}-.json",
        "rank{}",
        "{}.pt.trace.json.gz.json",
        "a b\nc{}.json",
    ],
)
def test_files_named_oddly(name: str, tmp_path: Path):
    hosts = job(3, 10, lambda r, s: 16_000 if r == 2 else 10_000)
    for host in hosts.values():
        del host.meta["distributedInfo"]
    found = analyse([save(hosts, tmp_path, name)])
    assert set(found.figures) == {0, 1, 2}
    assert found.straggler is not None and found.straggler.rank == 2


def packed(host: Host, path: Path, after: bytes) -> None:
    host.write(path)
    path.write_bytes(path.read_bytes() + after)


@pytest.mark.parametrize("after", [b"garbage" * 50, b"\0" * 512, b"\x1f\x8b\x08", b"\n"])
def test_bytes_behind_the_packed_data_cost_nothing(after: bytes, tmp_path: Path):
    host = job(1, 6)[0]
    plain = analyse([host.write(tmp_path / "plain.json")])
    (tmp_path / "odd").mkdir()
    packed(host, tmp_path / "odd" / "rank0.json.gz", after)
    assert straight(analyse([tmp_path / "odd"])) == straight(plain)


def test_operators_alone_have_no_communication(tmp_path: Path):
    host = Host(0, 1)
    host.add("cpu_op", "aten::mm", 0, 100)
    host.add("cpu_op", "aten::_foreach_add_", 300, 100)
    host.add("user_annotation", "Optimizer.step#SGD.step", 250, 200)
    found = analyse([save({0: host}, tmp_path)])
    assert straight(found) == (400, 200, 0, 0, 0, 200)
    assert found.figures[0].host_only and found.figures[0].exposed is None and found.straggler is None


def test_a_trace_written_in_one_line_with_escapes_and_odd_numbers(tmp_path: Path):
    host = job(1, 6)[0]
    plain = analyse([host.write(tmp_path / "plain.json")])
    text = json.dumps({"traceEvents": host.events, **host.meta}, separators=(",", ":"))
    odd = (
        '{"ph":"X","cat":"kernel","name":"k","ts":NaN,"dur":1},{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":Infinity},'
        '{"ph":"X","cat":"cpu_op","name":"\\ud800 }, { \\"traceEvents\\": [","ts":1,"dur":1,"dur":2},'
        f'{{"ph":"X","cat":"cpu_op","name":"k","ts":{"9" * 400},"dur":1}},'
    )
    at = text.index("[") + 1
    (tmp_path / "odd.json").write_text(text[:at] + odd + text[at:])
    after = text[at:].encode().replace(b"sgemm", b"\xffgemm")
    (tmp_path / "bytes.json").write_bytes(text[:at].encode() + odd.encode() + after)
    for name in ("odd.json", "bytes.json"):
        assert straight(analyse([tmp_path / name])) == straight(plain)


def test_ranks_that_another_tool_put_into_one_file_are_said(tmp_path: Path):
    """`trace merge` tools number the processes anew: the kernels of two ranks stand on two devices of one file."""
    events: list[dict[str, Any]] = []
    for rank, host in job(2, 6).items():
        for event in host.events:
            events.append(event | {"pid": f"rank{rank} {event['pid']}"})
    (tmp_path / "merged.json").write_text(json.dumps(events))
    found = analyse([tmp_path])
    assert any("2 devices" in note for note in found.notes) and found.straggler is None


def test_nodes_seconds_apart_with_files_that_begin_at_their_own_time(tmp_path: Path):
    """Since PyTorch 2.4 times count from `baseTimeNanoseconds`, which is each host's own clock."""
    hosts = job(4, 12, lambda r, s: 14_000 if r == 1 else 10_000, clock=lambda r: -1_000_000 + 37 * r, **group(4))
    for rank, host in hosts.items():
        host.meta |= {"baseTimeNanoseconds": 1_700_000_000_000_000_000 + (rank // 2) * 7_000_000_000}
    found = analyse([save(hosts, tmp_path)])
    assert found.straggler is not None and (found.straggler.rank, found.straggler.kind) == (1, "device")


def slow(rank: int, step: int) -> int:
    return 16_000 if rank == 2 else 10_000


def test_collectives_whose_launches_were_not_recorded(tmp_path: Path):
    """Profilers that did not trace the driver's calls have a launch of every kernel but of NCCL's."""
    hosts = job(4, 10, slow)
    for host in hosts.values():
        unknown = {e["args"]["correlation"] for e in host.events if "nccl" in e["name"]}
        host.events = [e for e in host.events if e["cat"] != "cuda_runtime" or e["args"]["correlation"] not in unknown]
    found = analyse([save(hosts, tmp_path)]).straggler
    assert found is not None and (found.rank, found.kind) == (2, "device")


def test_steps_of_any_number(tmp_path: Path):
    hosts = job(4, 10, slow)
    for host in hosts.values():
        for event in host.events:
            if event["name"].startswith("ProfilerStep#"):
                event["name"] = f"ProfilerStep#{10**12 + 10**9 * int(event['name'][13:])}"
    found = analyse([save(hosts, tmp_path)]).straggler
    assert found is not None and found.rank == 2


def test_exchanges_that_never_name_a_group_beside_collectives_that_do(tmp_path: Path):
    """DeepEP's kernels bear no group; of NCCL's one without was launched before the trace began."""
    hosts = job(4, 10, slow)
    for host in hosts.values():
        first, *others = [e for e in host.events if "nccl" in e["name"]]
        first["args"] = {key: first["args"][key] for key in ("stream", "correlation")}
        for event in others:
            name = "void deep_ep::intranode::dispatch<8, 768>(int4*)"
            host.launch(name, event["ts"] + event["dur"] - 900, 100, event["ts"] - 5, stream=28)
    found = analyse([save(hosts, tmp_path)])
    assert sorted((g.calls[0].op, g.begin.shape) for g in found.matched.groups) == [
        ("all_reduce", (4, 9)),
        ("dispatch", (4, 9)),
    ]
