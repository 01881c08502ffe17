"""What people paste who ask for help: the answer is right, or it says honestly that it cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.diagnose import diagnose_logs
from tests.unit.logs.pasted import EXCERPTS
from tests.unit.logs.strangers import Answer, late, status, trace


@pytest.mark.parametrize(("text", "answer"), [row[1:] for row in EXCERPTS], ids=[row[0] for row in EXCERPTS])
def test_excerpt(tmp_path: Path, text: str, answer: Answer):
    path = tmp_path / "pasted.log"
    path.write_text(text)
    found = diagnose_logs([str(path)])
    assert (None if found.verdict is None else (found.verdict.code, found.verdict.ranks)) == answer
    if answer is None:
        assert not found.findings


VIEWERS = {
    "stern": "trainer-worker-0 pytorch {}",
    "aws logs tail": "2026-11-26T05:15:00.123000+00:00 algo-1/abc {}",
    "a table of a console": "2026-11-26T05:15:00.123Z\talgo-1\t{}",
    "pdsh of a host without a number": "gpubox: {}",
    "a quoted mail": "> {}",
    "an indented block": "    {}",
    "loguru": "2026-11-26 05:15:00.123 | ERROR    | __main__:main:12 - {}",
}
BOXED = "a traceback in a box, as rich draws it"


@pytest.mark.parametrize("viewer", VIEWERS)
def test_what_a_viewer_puts_before_every_line_changes_no_answer(tmp_path: Path, viewer: str):
    path, differ = tmp_path / "viewed.log", []
    for name, text, answer in EXCERPTS:
        lines = text.splitlines()
        if len([line for line in lines if line.strip()]) < 8 or name == BOXED:
            continue  # too few to learn it from; columns beside a box
        path.write_text("".join(VIEWERS[viewer].format(line) + "\n" for line in lines))
        verdict = diagnose_logs([str(path)]).verdict
        if (None if verdict is None else (verdict.code, verdict.ranks)) != answer:
            differ.append(name)
    assert differ == []


def test_an_exception_that_begins_every_line_is_no_host(tmp_path: Path):
    path = tmp_path / "grepped.log"
    path.write_text("".join(f"RuntimeError: CUDA error: uncorrectable ECC error encountered ({n})\n" for n in range(9)))
    verdict = diagnose_logs([str(path)]).verdict
    assert verdict is not None
    assert verdict.code == "device-fault"
    path.write_text(
        "RuntimeError: bad batch\n" * 70 + "[ERROR] [launch.py:321:sigkill_handler] exits with return code = 1\n"
    )
    verdict = diagnose_logs([str(path)]).verdict
    assert verdict is not None
    assert "RuntimeError: bad batch" in verdict.summary


PODS = ("llm-master-0", "llm-worker-0", "llm-worker-1", "llm-worker-2")
COLLECTORS = {
    "kubectl logs --prefix": "[pod/{}/pytorch] {}",
    "stern": "{} pytorch {}",
    "stern with a bar": "{} pytorch | {}",
    "a file each": "",
}
RAISED = trace("m.py:31", "ValueError: bad batch")
LOST = trace("t.py:9", "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.3]:4123")


def pods(folder: Path, collector: str, said: dict[str, str]) -> None:
    """The pods' lines as a collector keeps them."""
    steps = [(pod, f"step {step} loss 2.5") for step in range(4) for pod in said]
    lines = [*steps, *((pod, line) for pod, text in said.items() for line in text.splitlines())]
    if COLLECTORS[collector]:
        whole = "".join(COLLECTORS[collector].format(pod, line) + "\n" for pod, line in lines)
        (folder / "all.log").write_text(whole)
    for pod in said if not COLLECTORS[collector] else ():
        (folder / f"{pod}.log").write_text("".join(line + "\n" for of, line in lines if of == pod))


@pytest.mark.parametrize("collector", COLLECTORS)
def test_the_pods_of_an_operator_are_ranks_after_the_masters(tmp_path: Path, collector: str):
    pods(tmp_path, collector, {pod: RAISED if pod == "llm-worker-1" else LOST for pod in PODS})
    verdict = diagnose_logs([str(path) for path in sorted(tmp_path.iterdir())]).verdict
    assert verdict is not None
    assert (verdict.code, verdict.ranks) == ("uncaught-exception", (2,))
    assert "m.py:31" in verdict.summary


TWO_EACH = {
    "torch says so of a line": {"llm-worker-1": RAISED, "llm-worker-2": trace("t.py:9", "OSError: gone", 5)},
    "torchrun starts several": {
        "llm-worker-1": "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default.\n" + RAISED
    },
}


@pytest.mark.parametrize("told", TWO_EACH)
@pytest.mark.parametrize("collector", COLLECTORS)
def test_pods_of_several_ranks_are_none(tmp_path: Path, collector: str, told: str):
    pods(tmp_path, collector, dict.fromkeys(PODS, LOST) | TWO_EACH[told])
    verdict = diagnose_logs([str(path) for path in sorted(tmp_path.iterdir())]).verdict
    assert verdict is None or set(verdict.ranks) <= {5}


def test_workers_of_ray_are_who_ray_says(tmp_path: Path):
    told = [
        "(TorchTrainer pid=9) Started distributed worker processes: ",
        "(TorchTrainer pid=9) - (node_id=aa, ip=10.0.0.2, pid=101) world_rank=0, local_rank=0, node_rank=0",
        "(TorchTrainer pid=9) - (node_id=bb, ip=10.0.0.3, pid=102) world_rank=1, local_rank=0, node_rank=1",
        *(f"(RayTrainWorker pid=102, ip=10.0.0.3) {line}" for line in RAISED.splitlines()),
        *(f"(RayTrainWorker pid=101) {line}" for line in LOST.splitlines()),
    ]
    path = tmp_path / "driver.log"
    path.write_text("\n".join(told) + "\n")
    verdict = diagnose_logs([str(path)]).verdict
    assert verdict is not None
    assert (verdict.code, verdict.ranks) == ("uncaught-exception", (1,))


ELSEWHERE = "Process 12345 has 60.10 GiB memory in use. "
OWN = "Including non-PyTorch memory, this process has 17.00 GiB memory in use. "
AS_A_CONTAINER_HAS_IT = "Process 777 has 74.53 GiB memory in use. "
UNKNOWN = "Process 888 has 17179869184.00 GiB memory in use. "
RESERVED = (
    "Of the allocated memory 63.32 GiB is allocated by PyTorch, and 9.85 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("told", "other"),
    [
        (ELSEWHERE + OWN + RESERVED, "process 12345 holds 60.10 GiB"),
        (AS_A_CONTAINER_HAS_IT + RESERVED, ""),
        (ELSEWHERE + AS_A_CONTAINER_HAS_IT + RESERVED, "process 12345 holds 60.10 GiB"),
        (UNKNOWN + OWN, ""),
    ],
)
def test_memory_of_another_process_is_told_and_the_ranks_own_is_not(tmp_path: Path, told: str, other: str):
    path = tmp_path / "pasted.log"
    path.write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 2 has a total capacity of 79.15 GiB"
        f" of which 4.61 GiB is free. {told}\n"
    )
    verdict = diagnose_logs([str(path)]).verdict
    assert verdict is not None
    assert verdict.code == "device-out-of-memory"
    assert other in verdict.summary
    assert ("holds" in verdict.summary) == bool(other)


LINK = (
    "n2:117:333 [1] transport/net_ib.cc:2360 NCCL WARN NET/IB: Got completion from peer 10.0.0.9<53393> with status=IBV_WC_RETRY_EXC_ERR(12)"
    " opcode=IBV_WC_RDMA_WRITE(1) reqSize=0 vendor_err=129 req_type=Send localGid ::ffff:10.1.1.1 remoteGids::ffff:10.1.1.2 hca mlx5_3"
)
ALL_WAIT = "\n".join(late(r, 8) + "\n" + status(r, 8, 9, 7) for r in range(4))
OF_A_LOADER = (
    trace("t.py:3", "ValueError: Caught ValueError in DataLoader worker process 3.", 1)
    + "\n[rank1]: Original "
    + trace("ds.py:71", "ValueError: cannot decode 42.jpg", 1).removeprefix("[rank1]: ")
)
OF_NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, unhandled cuda error (run with"
    " NCCL_DEBUG=INFO for details), NCCL version 2.19.3"
)
CAUSE = "\n[rank2]: \n[rank2]: The above exception was the direct cause of the following exception:\n[rank2]: \n"
LEFT = "\n".join(
    [
        *(late(r, 8) + "\n" + status(r, 8, 9, 7) for r in (0, 2, 3)),
        "[rank1]: step 7 loss 2.0",
        "[rank1]: Training complete",
    ]
)


@pytest.mark.parametrize(
    ("text", "told", "step"),
    [
        (f"{LINK}\n{ALL_WAIT}", "and none completes it; InfiniBand connections broke to 10.0.0.9 through mlx5_3", "links"),
        (OF_A_LOADER, "ValueError: cannot decode 42.jpg at /data/ana/ds.py:71", "exception"),
        (LEFT, "its log tells that training is complete", ""),
        ("step 3 loss 1.0\nsrun: error: n7: task 5: Segmentation fault", "SIGSEGV", "nobody killed it"),
        (trace("m.py:3", "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500", 0), "port 29500", "ss -ltnp"),
        ("\n".join(f"step {n} loss nan" for n in range(9)), "not finite", "one prints for all"),
        ("a.cu:250: nll_loss_kernel: block: [0,0,0], thread: [5,0,0] Assertion `t < n_classes` failed.\n" + trace("m.py:8", "RuntimeError: CUDA error: device-side assert triggered", 1), "(nll_loss_kernel asserts `t < n_classes`) at /data/ana/m.py:8", "out of range"),
        (trace("m.py:8", "RuntimeError: [enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file data/12: file write failed"), "could not write a checkpoint at /data/ana/m.py:8 in fit, as on a disk that is full", "Make room"),
        ("step 1 loss 2\ncorrupted size vs. prev_size\nprocess 2 terminated with signal SIGABRT", "SIGABRT) and found its heap corrupted (corrupted size vs. prev_size)", "MALLOC_CHECK_"),
        (trace("t.py:9", "RuntimeError: Error(s) in loading state_dict for Net:", 0) + "\n[rank0]: \tsize mismatch for tok.weight.", "Net: size mismatch for tok.weight at /data/ana/t.py:9", "exception"),
        (trace("t.py:9", "RuntimeError: ") + "\n    An attempt was made to start a process before the\n    current one has started.\n\n    More.", "RuntimeError: An attempt was made to start a process before the current one has started at", "exception"),
        (trace("t.py:9", OF_NCCL) + "\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'peer access'", "DistBackendError: Cuda failure 'peer access' at", "exception"),
        (trace("jit.py:9", "OutOfResources: shared memory", 2).replace("/data/ana", "/x/site-packages") + CAUSE + trace("t.py:4", "InductorError: OutOfResources", 2), "OutOfResources: shared memory at /data/ana/t.py:4", "exception"),
    ],
)  # fmt: skip
def test_what_a_person_reads(tmp_path: Path, text: str, told: str, step: str):
    path = tmp_path / "pasted.log"
    path.write_text(text + "\n")
    verdict = diagnose_logs([str(path)]).verdict
    assert verdict is not None
    assert told in verdict.summary
    assert step in verdict.next_step
