"""The lines that mean something, in one table: what each is, in which role, and the fields to take from it.

A role says what a line can be blamed for. ROOT: what is told there ends a rank by itself. STUCK: a rank waited too
long. CASCADE: the rank tells that another one is gone. TEARDOWN: somebody ends the job. ADVICE: counts where nothing
else says more. INFO: a fact of the job. The first row that fits a line names it, so the particular stand before the
general. Every `literal` is sought before the regular expression is run, and no expression can backtrack without bound.

Templates of torch 1.13 to 2.15, NCCL 2.10 to 2.29, DeepSpeed, SLURM and Kubernetes; versions differ in a few words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a line can be blamed for."""

    ROOT = "root"
    STUCK = "stuck"
    CASCADE = "cascade"
    TEARDOWN = "teardown"
    ADVICE = "advice"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Template:
    """One row. `code` is the finding of a ROOT row; `literals`: one of them is in every such line."""

    kind: str
    role: Role
    literals: tuple[str, ...]
    pattern: re.Pattern[str] | None = None
    code: str = ""


def _row(kind: str, role: Role, literals: str | tuple[str, ...], pattern: str = "", code: str = "") -> Template:
    words = (literals,) if isinstance(literals, str) else literals
    return Template(kind, role, words, re.compile(pattern) if pattern else None, code)


ROOT, STUCK, CASCADE, TEARDOWN, ADVICE, INFO = Role

WORK = (
    r"Work\w{2,12}\((?:SeqNum=(?P<seq>\d{1,18})(?=[,)])(?:, )?)?(?:OpType=(?P<op>\w{1,40}))?(?:, TensorShape=\[(?P<shape>[\d, ]{0,200})\])?"
    r"(?:, NumelIn=(?P<nin>\d{1,18}))?(?:, NumelOut=(?P<nout>\d{1,18}))?(?:, Timeout\(ms\)=(?P<timeout>\d{1,12}))?"
)
STATUS = r"[Ll]ast enqueued (?:NCCL )?work: (?P<issued>-?\d{1,18})(?:, last started (?:NCCL )?work: -?\d{1,18})?(?:, last completed (?:NCCL )?work: (?P<completed>-?\d{1,18}))?"
SIGNALLED = "Killed|Segmentation fault|Bus error|Illegal instruction|Floating point exception"
GROUP = re.compile(
    r"\[PG (?:ID (?P<id>\d{1,9}) )?(?:PG )?(?:GUID )?(?P<name>[^\s()\]]{0,80})? ?(?:\((?P<desc>[^)]{0,80})\))? ?Rank (?P<rank>-?\d{1,7})\]"
)
"""A process group before a watchdog's words: ``[PG 0 Rank 2]`` of torch 2.2 to ``[PG ID 1 PG GUID 1(mesh_tp) Rank 0]``."""

# fmt: off
TEMPLATES: tuple[Template, ...] = (
    # --- watchdog, heartbeat and store of torch ---
    _row("work-timeout", STUCK, "Watchdog caught collective operation timeout", WORK),
    _row("work-timeout", STUCK, "timed out in blocking wait", WORK),
    _row("work-timeout", STUCK, "Watchdog caught collective operation timeout"),  # a terminal broke the line
    _row("work-status", STUCK, "detected by watchdog at work", rf"at work(?: sequence id)?: (?P<seq>\d{{1,18}})\D{{1,40}}{STATUS}"),
    _row("work-status", STUCK, "Timeout at NCCL work", rf"Timeout at NCCL work: (?P<seq>\d{{1,18}})\D{{1,12}}{STATUS}"),
    _row("dump-signal", INFO, ("Received a dump signal", "Received a timeout signal"), rf"from (?P<source>this local rank| ?rank -?\d{{1,7}}).{{0,120}}{STATUS}"),
    _row("dump-signal", INFO, "Observed flight recorder dump signal"),
    _row("watchdog-stuck", STUCK, ("watchdog got stuck for", "Heartbeat monitor timed out"), r"stuck for (?P<seconds>\d{1,9}) seconds|Heartbeat"),
    _row("watchdog-stuck", STUCK, "Watchdog timeout (self.watchdog_timeout"),  # SGLang
    _row("gil", INFO, "Could not acquire GIL within"),
    _row("teardown", CASCADE, ("To avoid data inconsistency", "Some NCCL operations have failed or timed out")),
    _row("desync", STUCK, "but didn't join collective", r"\[(?P<ranks>[\d, ]{1,4000})\] finished collective #(?P<seq>\d{1,18}), but didn't join collective #(?P<next>\d{1,18})"),
    _row("desync", STUCK, "never join any collectives", r"\[(?P<ranks>[\d, ]{1,4000})\] never join any collectives"),
    _row("desync", STUCK, "are the lagging ranks that caused this timeout", r"ranks \[(?P<ranks>[\d, ]{1,4000})\] are the lagging ranks"),
    _row("desync-at", INFO, "started ranks:", r"#(?P<seq>\d{1,18}) started ranks:"),
    _row("desync-started", INFO, "] started ", r"\[(?P<ranks>[\d, ]{1,4000})\] started (?P<op>[A-Z_]\w{2,40})$"),
    _row("barrier-missing", STUCK, "failed to pass monitoredBarrier", r"[Rr]anks? (?P<ranks>\d[\d, ]{0,4000}) failed to pass monitoredBarrier"),
    _row("cascade", CASCADE, "successfully reached monitoredBarrier, but received errors"),
    _row("fingerprint", ROOT, "Detected mismatch between collectives on ranks", r"Rank (?P<rank>\d{1,7}) is running collective: CollectiveFingerPrint\((?P<mine>[^)]{0,300})", "collective-mismatch"),
    _row("ddp-shapes", ROOT, "appears not to match sizes of the same param in process", r"(?:\[Rank (?P<rank>\d{1,7})\]: )?params\[(?P<index>\d{1,9})\] in this process with sizes (?P<sizes>\[[\d, ]{0,100}\])", "shape-mismatch"),
    _row("ddp-shapes", ROOT, "DDP expects same model across all ranks", r"but Rank (?P<rank>\d{1,7}) has (?P<mine>\d{1,19}) params, while rank (?P<other>\d{1,7}) has inconsistent (?P<theirs>\d{1,19})", "shape-mismatch"),
    _row("unused-parameters", ROOT, ("Expected to have finished reduction in the prior iteration", "has parameters that were not used in producing the loss"), "", "unused-parameters"),
    _row("without-gradient", INFO, "which did not receive grad for rank", r"Parameter(?:s| indices) which did not receive grad for rank (?P<rank>\d{1,7}): (?P<names>\S[^\r\n]{0,200})"),
    _row("ready-twice", ROOT, "Expected to mark a variable ready only once", r"(?P<message>Expected to mark a variable ready only once)", "uncaught-exception"),
    _row("twice-ready", INFO, "has been marked as ready twice", r"(?P<which>Parameter at index \d{1,9})(?: with name (?P<name>[\w.\-]{1,200}))? has been marked"),
    _row("fingerprint-alone", ROOT, "is running inconsistent collective: CollectiveFingerPrint(", r"Rank (?P<rank>\d{1,7}) is running inconsistent", "collective-mismatch"),
    _row("nccl-mismatch", ROOT, ("Mismatched collective detected", "caused by a collective mismatch"), r"around rank (?P<rank>\d{1,7})", "collective-mismatch"),
    _row("nccl-mismatch", ROOT, "Mismatched collective detected", "", "collective-mismatch"),
    _row("nccl-truncated", ROOT, "message truncated : receiving", r"receiving (?P<got>\d{1,18}) bytes instead of (?P<wanted>\d{1,18})", "shape-mismatch"),
    _row("nccl-truncated", ROOT, "Message truncated : received", r"received (?P<got>\d{1,18}) bytes instead of (?P<wanted>\d{1,18})", "shape-mismatch"),
    _row("store-waits", STUCK, ("waiting for clients. ", "waiting for workers. "), r"Timed out after (?P<seconds>\d{1,9}) seconds waiting for (?:clients|workers)\. (?P<joined>\d{1,7})/(?P<size>\d{1,7})\b"),
    _row("store-barrier", STUCK, "Timed out initializing process group in store based barrier", r"on rank:? (?P<rank>\d{1,7})[^(]{0,80}\((?:\w+=)?[^)]{0,80}world_size=(?P<size>\d{1,7}), (?:worker_count|num_workers_joined)=(?P<joined>\d{1,7})"),
    _row("store-barrier-waits", INFO, "Waiting in store based barrier", r"rank: (?P<rank>\d{1,7}), key: (?P<key>\S{1,200}) \(world_size=(?P<size>\d{1,7}), (?:worker_count|num_workers_joined)=(?P<joined>\d{1,7})"),
    _row("store-barrier-over", INFO, "Completed store-based barrier for key:", r"for key:(?P<key>\S{1,200}) with"),
    _row("store-connect", STUCK, ("while trying to connect to (", "client socket has failed to connect to"), r"connect to (?:any network address of )?\((?P<host>[^,)]{1,200}), (?P<port>\d{1,5})\)"),
    _row("store-connect", STUCK, "while trying to connect to ", r"connect to (?P<host>[\w.\-]{1,200}):(?P<port>\d{1,5})\b"),
    _row("store-connect", STUCK, "cannot be retrieved (gai error", r"addresses of \((?P<host>[^,)]{1,200}), (?P<port>\d{1,5})\) (?P<unknown>cannot) be"),
    _row("store-bind", STUCK, "server socket has failed to listen on any local network address", r"any local network address(?:.{0,120}?(?:port: |[\]0]:)(?P<port>\d{1,5})\b)?"),
    _row("store-port", INFO, ("server socket has failed to bind to", "server socket has failed to listen on"), r"failed to (?:bind to|listen on) \S{1,80}:(?P<port>\d{1,5}) \(errno: (?:98|13)\b"),
    _row("exit-barrier", CASCADE, "Error waiting on exit barrier"),
    _row("store-lost", CASCADE, ("has failed to send a keep-alive heartbeat", "has failed to shutdown the rendezvous", "due to an error of type Rendezvous")),
    _row("rendezvous", STUCK, ("RendezvousTimeoutError", "RendezvousConnectionError", "connection to the C10d store has failed")),
    _row("nccl-id", STUCK, "is setting up NCCL communicator and retr", r"\[(?P<rank>\d{1,7})\] is setting up NCCL communicator and retr(?:ie|ei)ving ncclUniqueId from \[(?P<source>\d{1,7})\]"),
    _row("store-waits", STUCK, "wait timeout after", r"wait timeout after (?P<ms>\d{1,12})ms, keys: (?P<keys>\S{1,200})"),
    _row("store-waits", STUCK, ("Error: Socket Timeout", "Timeout waiting for key: ", "connect() timed out. Original timeout was")),
    _row("store-lost", CASCADE, ("recvValue failed", "sendBytes failed", "recvBytes failed", 'Failed to check the "should dump" flag', "TCPStore server has shut down", "failed to recv, got 0 bytes")),
    _row("rendezvous-closed", CASCADE, "RendezvousClosedError"),
    _row("checkpoint-failed", CASCADE, "CheckpointException ranks:"),
    # --- NCCL's connections, in words that Gloo has as well ---
    _row("nccl-bootstrap", STUCK, ("NCCL WARN Bootstrap : ", "NCCL WARN bootstrap", "NCCL WARN Call to connect", "NCCL WARN Connect to", "NCCL WARN Net : Connect to", "socketStartConnect: Connect to", "socketPollConnect: ", "socketFinalizeAccept: ", "socketTryAccept: "), r"(?:NCCL WARN |(?=socket[SPFT]))(?P<what>[^\r\n]{1,160})"),
    _row("nccl-bootstrap", STUCK, "NCCL WARN NET/OFI ", r"NCCL WARN (?P<what>NET/OFI (?:Couldn't|Unable to|Failed to) (?:open|bind|enable|create|allocate)[^\r\n]{1,140})"),
    _row("nccl-remote", CASCADE, ("NCCL INFO ", "NCCL WARN "), r"NCCL (?:INFO|WARN) (?!\[Service thread\]).{0,200}(?:Connection (?:closed|reset|refused)|Broken pipe|Socket closed)"),
    _row("nccl-bootstrap", STUCK, ("rror encountered progressing operation=Connect, res=2", "Failed to execute operation Connect from rank"), r"(?P<what>Failed to execute operation Connect from rank \d{1,7}, retcode 2\b|Error encountered progressing operation=Connect, res=2\b)"),
    # --- Horovod ---
    _row("horovod-stalled", STUCK, ("[missing ranks: ", "[ready ranks: "), r"\[(?:missing|ready) ranks: [\d, ]{1,4000}\]"),
    _row("horovod-down", CASCADE, "Horovod has been shut down"),
    # --- HCCL, the library of Ascend devices ---
    _row("hccl-start", STUCK, ("EI0006: ", "EI0009: ", "EI0015: ", "EJ0001: "), r"(?:EI000[69]|EI0015|EJ0001): (?:\[PID: \d{1,9}\] )?(?:[\d.:\-]{10,40} )?(?P<what>[^\r\n]{1,160})"),
    _row("hccl-timeout", STUCK, ("EI0002: ", "hccl fftsplus task timeout", "EE1002: ")),
    _row("cascade", CASCADE, ("OPS function error: Hccl", "HCCL error in: ")),
    _row("hccl-timeout", STUCK, "error code is 507", r"error code is 50704[68]"),
    _row("hccl-timeout", STUCK, "error code is 107020"),
    _row("deepep-timeout", STUCK, ("DeepEP error: timeout", "DeepEP timeout check failed")),
    # --- Gloo ---
    _row("gloo-timeout", STUCK, "Timed out waiting", r"Timed out waiting (?P<ms>\d{1,12})ms for (?P<what>recv|send)"),
    _row("gloo-timeout", STUCK, "Application timeout caused pair closure"),
    _row("gloo-closed", CASCADE, ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused")),
    _row("gloo-mesh", STUCK, "Gloo connectFullMesh failed"),
    _row("gloo-sizes", ROOT, "op.preamble.length <= op.nbytes", r"op\.nbytes\. (?P<got>\d{1,18}) vs (?P<wanted>\d{1,18})", "shape-mismatch"),
    _row("gloo-sizes", ROOT, "Invalid scalar type", "", "dtype-mismatch"),
    # --- NCCL ---
    _row("nccl-duplicate", ROOT, "Duplicate GPU detected", r"rank (?P<rank>\d{1,7}) and rank (?P<other>\d{1,7}) both on CUDA device (?P<device>\w{1,20})", "nccl-misuse"),
    _row("nccl-segment", ROOT, ("Error while creating shared memory segment /dev/shm", "failed to extend /dev/shm"), r"(?:segment|extend) (?P<path>/dev/shm[^\s,)]{0,120})", "disk-full"),
    _row("nccl-shm", ROOT, "No space left on device", r"(?P<path>/dev/shm[^\s,)]{0,120})|No space", "disk-full"),
    _row("ib-completion", STUCK, "Got completion from peer", r"from peer (?P<peer>[^\s<]{1,80})(?:<\d{1,5}>)? with (?:status|error)[= ](?:\w{1,40}\()?(?P<status>\d{1,6})(?:.{0,300} hca (?P<hca>[\w.:]{1,40}))?"),
    _row("ib-completion", STUCK, "Got completion with error", r"completion with error (?P<status>\d{1,6})"),
    _row("ib-completion", STUCK, ": got completion with error:", r"mlx\d: [\w.\-]{1,80}: got"),  # libmlx5
    _row("ib-completion", STUCK, "NET/OFI Request", r"NET/OFI (?P<what>Request \S{1,40} completed with error[^\r\n]{0,120})"),
    _row("ib-completion", STUCK, "Got async event", r"NET/IB : (?P<hca>[\w.:]{1,40}:\d{1,4}) Got async event ?: (?P<event>(?!client rereg|port active|(?:GID|P_Key) table|SM change|LID change|communication est)[^\r\n]{1,80})"),
    _row("ib-call", STUCK, "Call to ibv_", r"^(?!NCCL INFO).{0,300}?Call to (?P<call>ibv_(?!query_ece|set_ece|reg_dmabuf)\w{1,60}) failed(?: with (?:error )?(?:\d{1,4} )?(?P<event>[^\r\n,]{1,80}))?(?:.{0,40}on dev (?P<hca>[\w.:]{1,40}))?"),
    _row("ib-link", STUCK, "NCCL WARN NET/IB : ", r"NET/IB : (?P<what>[^\r\n]{1,160})"),
    _row("nccl-misuse", ROOT, ("ncclInvalidUsage", "ncclInvalidArgument", "invalid usage (run with", "invalid argument (run with", "invalid usage, NCCL version", "invalid argument, NCCL version"), "", "nccl-misuse"),
    _row("nccl-twice", ROOT, "has already checked in", r"rank (?P<rank>\d{1,7}) of \d{1,7} ranks has already checked in", "nccl-misuse"),
    _row("nccl-version", ROOT, ("NCCL WARN Mismatched NCCL version", "version mismatch detected"), "", "nccl-misuse"),
    _row("nccl-remote", CASCADE, ("ncclRemoteError", "remote process exited or there was a network error", "NCCL communicator was aborted", "NCCL communicator encountered error", "remote error detected from rank", "connection closed by remote peer", "Connection closed by remote peer", "socketProgress: Connection", "NCCL Error 6:")),
    _row("nccl-cuda", ADVICE, "NCCL WARN Cuda failure", r"NCCL WARN (?P<what>Cuda failure (?:\d{1,4} )?'(?!out of memory)[^'\r\n]{1,120}')"),
    _row("nccl-system", CASCADE, ("ncclSystemError", "ncclInternalError", "unhandled system error")),
    _row("nccl-ended", INFO, "Abort COMPLETE", r"rank (?P<rank>\d{1,7}) nranks (?P<size>\d{1,7})"),
    _row("nccl-init", INFO, "Init START", r"rank (?P<rank>\d{1,7}) nranks (?P<size>\d{1,7})(?:.{0,160}commId (?P<comm>0x[0-9a-f]{1,20}))?"),
    _row("nccl-ready", INFO, "Init COMPLETE", r"rank (?P<rank>\d{1,7}) nranks (?P<size>\d{1,7})(?:.{0,160}commId (?P<comm>0x[0-9a-f]{1,20}))?"),
    _row("transport", INFO, ("via NET/", "via P2P", "via SHM"), r" : (?P<rank>\d{1,7})\[[^\]]{1,20}\] -> (?P<other>\d{1,7})\[[^\]]{1,20}\].{0,20} via (?P<transport>(?:NET|P2P|SHM)[\w/]{0,40})"),
    _row("network", INFO, "NCCL INFO Using network", r"Using network (?P<network>[\w\-]{1,40}(?: [\w]{1,20}){0,3})"),
    _row("ib-found", INFO, "NET/IB : Using [", r"Using \[0\](?P<hca>[\w.:/]{1,60})"),
    _row("port-down", INFO, "Link DOWN", r"(?P<hca>[\w.]{1,40}): Port: \d{1,4} Link DOWN"),
    _row("ib-none", INFO, "NET/IB : No device found"),
    _row("transport-problem", INFO, ("Failed to open libibverbs", "NET/OFI Failed", "NET/OFI aws-ofi-nccl initialization failed", "NET/IB : Unable to open device", "P2P is disabled between connected GPUs")),
    _row("set-by-hand", INFO, ("NCCL_IB_DISABLE set by environment to 1", "NCCL_NET set by environment to Socket", "NCCL_P2P_DISABLE set by environment to 1")),
    _row("nccl-warn", INFO, "NCCL WARN ", r"NCCL WARN (?!Cuda failure (?:2 )?'out of memory)(?P<what>[^\r\n]{1,160})"),
    # --- memory ---
    _row("device-oom", ROOT, "out of memory. Tried to allocate", r"Tried to allocate (?P<wanted>more than 1EB|[\d.]{1,12} [KMGTP]?i?[Bb](?:ytes)?)", "device-out-of-memory"),
    _row("device-oom", ROOT, ("CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "OutOfMemoryError: CUDA", "HIP out of memory", "cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED", "PT_DEVMEM Allocation failed", "NCCL WARN Cuda failure 'out of memory'", "NCCL WARN Cuda failure 2 'out of memory'"), "", "device-out-of-memory"),
    _row("device-oom", ROOT, "RESOURCE_EXHAUSTED: ", r"RESOURCE_EXHAUSTED: .{0,200}(?:allocat|[Mm]emory|hbm|HBM)", "device-out-of-memory"),  # XLA
    _row("host-oom", ROOT, ("Out of memory: Killed process", "Memory cgroup out of memory"), r"Killed process (?P<pid>\d{1,9})", "rank-oom-killed"),
    _row("host-oom", ROOT, ("oom_kill event", "oom-kill event", "oom-kill:constraint", ": Out Of Memory", "OOM Killed", "OOMKilled", "OUT_OF_MEMORY", "oom-killer"), r"(?:^.{0,400}?srun: error: (?P<host>[\w.\-]{1,80}): tasks? (?P<tasks>[\d,\-]{1,400}): Out)|oom|OOM|Out Of Memory|OUT_OF_MEMORY", "rank-oom-killed"),
    _row("host-oom", ROOT, ("killed due to memory pressure (OOM)", "due to the node running low on memory", "was low on resource: memory"), "", "rank-oom-killed"),
    _row("host-oom", ROOT, ("DataLoader worker (pid", "worker(s) exited unexpectedly"), r"(?:is killed by signal: Killed|exited unexpectedly)", "rank-oom-killed"),
    _row("shm", ROOT, ("Unexpected bus error encountered in worker", "insufficient shared memory", "workers are out of shared memory"), "", "disk-full"),
    # --- device ---
    _row("nvls", ROOT, "NVLink SHARP (NVLS) Multicast memory", "", "device-fault"),
    _row("xid", ROOT, "Xid (PCI", r"(?<!S)Xid \(PCI:(?P<bus>[\w:.]{1,40})\): (?P<xid>(?!(?:63|92|93)\b)\d{1,4})(?!.{0,200}Nonfatal)", "device-fault"),
    _row("xid-noted", INFO, "Xid (PCI", r"(?<!S)Xid \(PCI"),  # a repair that is booked, or what the driver got over
    _row("sxid", ROOT, "SXid (PCI", r"SXid \(PCI:(?P<bus>[\w:.]{1,40})\): (?P<xid>\d{1,5}), Fatal", "device-fault"),
    _row("ecc", ROOT, ("uncorrectable ECC error", "uncorrectable NVLink error", "fallen off the bus", "CUDA error: hardware stack error", "CUDA-capable device(s) is/are busy or unavailable", "unspecified driver error", "system not yet initialized", "CUDA_ERROR_SYSTEM_NOT_READY", "Unable to determine the device handle for GPU", "cudaErrorECCUncorrectable", "uncorrectable hardware error", "CUDA_ERROR_ECC", "GPU is lost", "Driver/library version mismatch", "Device is NOT usable", "failed to initialize the H/W"), r"^(?!.*(?:\bno (?:uncorrectable|device|GPU)|\b0 (?:devices|GPUs) |count = 0))", "device-fault"),
    _row("device-lost", ROOT, ("UR_RESULT_ERROR_DEVICE_LOST", "ZE_RESULT_ERROR_DEVICE_LOST", "HSA_STATUS_ERROR_EXCEPTION"), "", "device-fault"),
    _row("device-lost", ROOT, "HW Exception by GPU node", r"reason ?: ?(?:GPU Hang|ECC)", "device-fault"),
    _row("illegal-address", ROOT, ("illegal memory access was encountered", " error: misaligned address", " error: invalid program counter", " error: unspecified launch failure", " error: an illegal instruction", "Memory access fault by GPU", "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access encountered"), "", "illegal-address"),
    _row("loss-nan", ROOT, "in local forward loss", r"(?:Rank |on rank )(?P<rank>\d{1,7})\b.{0,200}found (?:NaN|Inf) in local forward loss", "loss-nonfinite"),
    _row("gradient-nan", ROOT, ("in local grad norm", "Unexpected result nan", "Unexpected result inf"), r"(?:Rank |on rank )(?P<rank>\d{1,7})\b.{0,200}(?:found (?:NaN|Inf) in local grad norm|grad norm)", "gradient-nonfinite"),
    _row("exception", ROOT, "watchdog thread terminated with exception: CUDA error: ", r"exception: (?P<message>CUDA error: (?!driver shutting down|context is destroyed)[^\r\n]{1,200})", "uncaught-exception"),
    _row("exception", ROOT, ("cuDNN error: CUDNN_STATUS_", "CUDA error: CUBLAS_STATUS_"), r"(?P<type>RuntimeError): (?P<message>cuDNN error: [^\r\n]{1,200}|CUDA error: CUBLAS_STATUS_[^\r\n]{1,200})", "uncaught-exception"),
    _row("exception", ROOT, "Too many open files. Communication with the workers", r"(?P<message>Too many open files\. Communication with the workers[^.\r\n]{0,80})", "uncaught-exception"),
    # --- disk ---
    _row("evicted", ROOT, ("was low on resource: ephemeral-storage", "ephemeral local storage usage exceeds the total limit"), "", "disk-full"),
    _row("quota", ROOT, ("Disk quota exceeded", "Errno 122", "Errno 28]"), "", "disk-full"),
    _row("checkpoint-write", ROOT, ("PytorchStreamWriter failed writing file", "] . unexpected pos "), "", "disk-full"),
    _row("cuda-failure", ROOT, "unhandled cuda error", r"(?:^|[ :])(?P<type>[\w.]{1,80}Error): (?P<message>NCCL error[^\r\n]{1,300})|unhandled", "uncaught-exception"),
    # --- services that run models, ray ---
    _row("engine-waits", INFO, "No available shared memory broadcast block found", r"found in (?P<seconds>\d{1,6}) seconds"),
    _row("engine-rpc", STUCK, "RPC call to ", r"RPC call to (?P<call>\w{1,60}) timed out"),
    _row("engine-died", CASCADE, ("Engine core initialization failed", "WorkerProc initialization failed due to an exception", "EngineDeadError", "EngineCore encountered an issue", "Got fatal signal from worker processes")),
    _row("ray-died", CASCADE, ("The actor died unexpectedly before finishing this task", "A worker died or was killed while executing a task", "ray.exceptions.WorkerCrashedError", "ray.exceptions.NodeDiedError", "its node has died", "its owner has died", "The actor is dead because its worker process has died"), r"(?:.{0,2000}?Worker IP address: (?P<host>[\w.:]{1,60}).{0,200}?Worker PID: (?P<pid>\d{1,9}))?"),
    _row("worker-died", CASCADE, "died unexpectedly, shutting down executor", r"Worker proc (?:VllmWorker-(?P<worker>\d{1,5})\b)?"),
    # --- endings ---
    _row("exit-code", TEARDOWN, "failed (exitcode:", r"failed \(exitcode: (?P<exit>-?\d{1,6})\) local_rank: (?P<local>\d{1,7}) \(pid: (?P<pid>\d{1,9})\)"),
    _row("restart", INFO, "will restart worker group", r"(?P<left>\d{1,6})/(?P<all>\d{1,6}) attempts left"),
    _row("forced", TEARDOWN, "forcefully exiting", r"process (?P<pid>\d{1,9}) via"),
    _row("interrupted", TEARDOWN, ("closing signal SIGHUP", "closing signal SIGINT"), r"(?:process (?P<pid>\d{1,9}) )?closing signal SIG(?:HUP|INT)"),
    _row("closing", TEARDOWN, "Sending process", r"Sending process (?P<pid>\d{1,9}) closing signal"),
    _row("closing", TEARDOWN, ("closing signal SIG", "via signal SIG", "Sending process")),
    _row("node-failed", ROOT, ("NODE FAILURE", "Node failure on"), r"Node failure on (?P<host>[\w.\-\[\],]{1,120})|NODE FAILURE", "rank-dead"),  # who prints the latter lives
    _row("not-started", ROOT, " failed on node ", r"Task launch for (?P<step>\S{1,40}) failed on node (?P<host>[\w.\-]{1,120}): (?P<what>[^\r\n]{1,120})", "rank-dead"),
    _row("interrupted", TEARDOWN, ("death signal, shutting down workers", "DUE TO TIME LIMIT", "DUE TO PREEMPTION", "DUE TO PREEMPT", "CANCELLED AT", "CANCELLED by", "SIGTERM received", "Received SIGTERM", "got signal: 15", "got signal: 1", "got signal: 2", "Received SIGUSR1", "slurmstepd: error: *** JOB", "slurmstepd: error: *** STEP", "caught signal 15", "Requeuing job")),
    _row("interrupted", TEARDOWN, ("preempted", "Preempted"), r"\b(?i:jobs?|tasks?|nodes?|instances?|vms?|tpus?|hosts?|pods?|allocation|workers?)\b.{0,60}\b[Pp]reempted\b(?!, or )"),
    _row("interrupted", TEARDOWN, "KeyboardInterrupt", r"^KeyboardInterrupt(?::|\s{0,4}$)|Signal 2 \(SIGINT\)"),
    _row("srun-task", TEARDOWN, "srun: error:", r"srun: error: (?P<host>[\w.\-]{1,80}): tasks? (?P<tasks>[\d,\-]{1,400}): (?P<how>[^\r\n]{1,120})"),
    _row("child-signal", TEARDOWN, "received by PID", r"Signal (?P<signal>\d{1,3}) \((?P<name>\w{1,20})\) received by PID (?P<pid>\d{1,9})"),
    _row("deepspeed-exit", TEARDOWN, "exits with return code", r"Process (?P<pid>\d{1,9}) exits with return code = (?P<exit>-?\d{1,6})|exits with return code = (?P<code>-?\d{1,6})"),
    _row("spawn-exit", TEARDOWN, "terminated with code", r"(?:\[rank: (?P<rank>\d{1,7})\] )?Child process with PID (?P<pid>\d{1,9}) terminated with code (?P<exit>-?\d{1,6})"),
    _row("spawn-exit", TEARDOWN, "noticed that process rank", r"process rank (?P<rank>\d{1,7}) with PID \S{1,20} on node (?P<host>[\w.\-]{1,80}) exited on signal (?P<number>\d{1,3})"),
    _row("spawn-exit", TEARDOWN, ("crashed with exit code", "exited with code"), r"[Rr]ank (?P<rank>\d{1,7}) (?:\(PID (?P<pid>\d{1,9})\) )?(?:crashed with exit|exited with) code (?P<exit>-?\d{1,6})"),
    _row("spawn-exit", TEARDOWN, "MPI_ABORT was invoked on rank", r"on rank (?P<rank>\d{1,7})"),
    _row("mpi-first", TEARDOWN, "noticed that process rank", r"process rank (?P<rank>\d{1,7}) with PID"),  # the signal is told in the next line
    _row("mpi-first", TEARDOWN, "RUNNING AT", r"=   RANK (?P<rank>\d{1,7}) PID \d{1,9} RUNNING AT (?P<host>[\w.\-]{1,80})"),
    _row("mpi-code", TEARDOWN, ("signal ", "KILLED BY SIGNAL: "), r"^(?:(?:exited )?on )?(?:signal|=   KILLED BY SIGNAL:) (?P<number>\d{1,3})(?: \(|\.?$)"),
    _row("mpi-first", TEARDOWN, "Process name: [[", r"Process name: \[\[\d{1,9},\d{1,9}\],(?P<rank>\d{1,7})\]"),
    _row("mpi-first", TEARDOWN, "scheduler is dead", r"Rank (?P<rank>\d{1,7}) scheduler is dead"),  # SGLang
    _row("mpi-code", TEARDOWN, ("Exit code:", "EXIT CODE:"), r"^(?:\s{0,8}Exit code:|=   EXIT CODE:)\s{1,8}(?P<exit>-?\d{1,6})$"),
    _row("died-with", TEARDOWN, "died with <Signals.", r"died with <Signals\.(?P<signal>SIG\w{1,12}): \d{1,3}>"),
    _row("spawn-exit", TEARDOWN, "terminated with", r"[Pp]rocess (?P<rank>\d{1,7}) terminated with (?:exit code (?P<exit>-?\d{1,6})|signal (?P<signal>SIG\w{1,12})|the following error)"),
    _row("signalled", TEARDOWN, ("Killed", "Segmentation fault", "Bus error", "Illegal instruction", "Floating point exception", "received at time=", "received by PID", "Caught signal ", "), PID: "), rf"^(?:\S{{1,200}}: line \d{{1,7}}: {{1,8}}\d{{1,9}} |Fatal Python error: )(?P<signal>{SIGNALLED})\b|^(?P<alone>{SIGNALLED})(?: \(core dumped\))?$|\*\*\* (?P<caught>SIG(?:SEGV|BUS|ILL|FPE|ABRT))(?: \(@.{{1,40}}?received by PID| received (?:at time=|by PID))|^\[?[^\]]{{0,80}}\]? ?Caught signal \d{{1,2}} \((?P<handled>{SIGNALLED})|^(?P<told>SIG(?:SEGV|BUS|ILL|FPE|ABRT))\(\d{{1,2}}\), PID: "),
    _row("aborted", TEARDOWN, "(core dumped)", r"^(?:\S{1,200}: line \d{1,7}: {1,8}\d{1,9} )?(?P<alone>Aborted) {1,30}\(core dumped\)"),
    _row("segfault", TEARDOWN, ("Segmentation fault", "Fatal Python error", "(core dumped)", "Bus error", "*** Process received signal ***", "Illegal instruction"), r"(?P<what>Segmentation fault|Fatal Python error: [^\r\n]{1,80}|Aborted|Bus error|Illegal instruction|Floating point exception|\(core dumped\)|Process received signal)"),
    _row("cascade", CASCADE, ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "SignalException", "torch.distributed.elastic.multiprocessing.errors", "watchdog thread terminated with exception", "exitcode  :", "terminate called after throwing", "DistBackendError", "DistNetworkError", "DistStoreError", "CalledProcessError", "concurrent.futures.process.BrokenProcessPool")),
    _row("completed", INFO, ("worker group successfully finished", "train_runtime", "`Trainer.fit` stopped", "Training completed", "Training complete", "training complete", "Finished training", "finished training", "Training finished", "training done", "Training done", "Training is done", "exiting program at iteration", "Training finished successfully")),
    _row("heap", INFO, ("double free or corruption", "free(): ", "malloc(): ", "malloc_consolidate(): ", "corrupted size vs. prev_size", "corrupted double-linked list", "munmap_chunk(): "), r"^(?P<what>double free or corruption(?: \(\S{1,12}\))?|(?:free|malloc\w{0,20}|munmap_chunk)\(\): [a-z][^\r\n]{1,80}|corrupted [^\r\n]{1,60})"),
    _row("device-assert", ADVICE, "Assertion `", r"\.cuh?:\d{1,7}: (?P<kernel>(?!(?:block|operator|lambda|unknown)\b)\w{1,120}(?:::\w{1,120}){0,8})[^`]{1,120}Assertion `(?P<what>[^`'\r\n]{1,120})[`'](?: failed|\s{0,4}$)"),
    _row("device-assert", ADVICE, "Assertion ", r"(?P<kernel>[\w.\-]{1,80}\.(?:cuh?|py):\d{1,7}): .{0,300}?block: ?\[[\d, ]{1,30}\],? thread: ?\[[\d, ]{1,30}\],? Assertion `?(?P<what>[^`'\r\n]{1,120}?)[`']?(?: failed|\.?\s{0,4}$)"),
    _row("completed", INFO, "finished: ", r"^finished: \d{1,12} steps?\b"),  # runtime.train
    _row("completed", INFO, " passed", r"(?<!failed, )\b\d{1,7} passed(?:, \d{1,7} (?:skipped|deselected|xfailed|xpassed|warnings?)){0,4} in [\d.]{1,12}s"),  # pytest
    # --- facts of the job ---
    _row("member", INFO, "GLOBAL_RANK: ", r"GLOBAL_RANK: (?P<rank>\d{1,7}), MEMBER: \d{1,7}/(?P<members>\d{1,7})"),
    _row("world", INFO, ("world_size", "world size", "Num processes:", "Starting with", "WORLD_SIZE"), r"(?:[wW]orld[ _]size|WORLD_SIZE|Num processes)['\"]?\s{0,4}[:=]{0,2}\s{0,4}(?P<size>\d{1,7})|Starting with (?P<started>\d{1,7}) processes"),
    _row("exception", ROOT, '"message": "', r'^\s{0,8}"message": "(?P<type>(?!\S{0,80}ChildFailed)[A-Za-z_][\w.]{0,80}(?:Error|Exception)): (?P<message>\S[^\r\n]{0,300}?)",?$', "uncaught-exception"),  # torch's error_handler
    _row("bare-exception", ADVICE, ".py: error: ", r"^(?P<type>[\w./\-]{1,120}\.py): error: (?P<message>\S[^\r\n]{0,300})"),
    _row("bare-exception", ADVICE, ("Error: ", "Exception: "), r"^(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception)): (?P<message>\S[^\r\n]{0,300})"),
    _row("launch", INFO, "nproc_per_node", r"nproc_per_node\s{0,8}[:=]\s{0,4}(?P<nproc>\d{1,5})"),
    _row("several-launched", INFO, "Setting OMP_NUM_THREADS environment variable for each process"),  # torchrun, of more than one
)
# fmt: on

ANCHORS: tuple[bytes, ...] = (
    b"rror", b"xception", b"Traceback", b"NCCL", b"nccl", b"imed out", b"join", b"onitoredBarrier", b"mismatch",
    b"out of memory", b"oom", b"OOM", b"Xid", b"GPU", b"No space", b"exitcode", b"ignal", b"SIG", b"reempt", b" code",
    b"exiting", b"terminated", b"core dumped", b"egmentation", b"orld", b"WORLD_SIZE", b"GLOBAL_RANK", b"rocesses",
    b"nproc_per", b"OMP_NUM_", b"raining", b"train_runtime", b"successfully", b"Trainer.fit", b"Interrupt",
    b"Root Cause", b"Failures:", b"illed", b"failed", b"Failed", b"oss", b"teration", b"it/s", b"s/it",
    b"worker group", b"atchdog", b"Gloo", b"exited", b"fallen off", b"not yet init", b"checked in", b"Process name",
    b"lagging ranks", b"shared memory", b"ibv_", b"EI00", b"EJ0001", b"EE1002", b"worker died", b"is dead",
    b"DEVICE_LOST", b"HSA_STATUS", b"on resource: ", b"storage usage", b"finished: ", b" passed", b"] started",
    b"started ranks", b"global rank", b"MPI_AB", b"RUNNING AT", b"EXIT CODE", b"RPC call", b"receive grad", b"hccl",
    b"died with", b'File "', b"Call stack:", b"died unexp", b"orrupt", b"free(): ", b"llegal mem", b"consolidate(",
    b"Got completion", b"essage trunc", b"version mism", b"Assertion", b"alloc(): ", b"munmap_", b"llegal instr",
    b"socket", b"GIL", b"nconsisten", b"not to match", b"Mismatched", b"aiting", b"barrier", b"connect to",
    b"timeout", b"TCPStore", b"onnection ", b"Broken pipe", b"Socket closed", b"preamble", b"scalar type", b"NET/",
    b"async event", b"(run with", b"COMPLETE", b"Init START", b"via P2P", b"via SHM", b"ALLOC_FAILED", b"EXHAUSTED",
    b"Out Of Mem", b"OUT_OF_MEM", b"low on mem", b"worker (pid", b"Multicast", b"unavailable", b"CUDA_ERROR",
    b"grad norm", b"Unexpected result", b"quota exc", b"Errno", b"unexpected pos", b"encountered an issue",
    b"has died", b"ssing ranks: ", b"ready ranks: ", b"(local_rank: ", b"as been shut down", b"ready only once",
    b"as ready twice", b"NOT usable", b"Link DOWN", b"[batch=", b"[step=", b"| Batchsize: ", b"keep-alive", b"shutdown the", b"error of type", b"open files", b"Sending process", b"NODE FAIL", b"Node failure", b"DUE TO", b"CANCELLED", b"Requeu",
    b"received by", b"received at", b"process rank", b"), PID", b"after throwing", b"BrokenProcess", b"Starting with",
    b'"message": ',
)  # fmt: skip
"""What a line must hold to be looked at: one of these is in every literal of the table, and in every line of `progress`."""


_LITERALS = tuple({literal for row in TEMPLATES for literal in row.literals})
_WITH_DIGITS = tuple(literal for literal in _LITERALS if any(letter.isdigit() for letter in literal))
_WITHOUT_THEM = tuple(re.sub(r"\d", "", literal).encode() for literal in _WITH_DIGITS)


def says_nothing(text: str) -> bool:
    """Whether the table has no row for the line, nor for any other that differs from it in digits only.

    The exceptions are lines with a literal that has digits itself: see `has_digits`.
    """
    return not any(literal in text for literal in _LITERALS)


def may_have_digits(shape: bytes) -> bool:
    """Whether a line that is `shape` without its digits may hold such a literal."""
    return any(literal in shape for literal in _WITHOUT_THEM)


def has_digits(text: str) -> bool:
    """Whether the line holds a literal of the table that has digits itself, as ``Errno 28]``."""
    return any(literal in text for literal in _WITH_DIGITS)


def match(text: str) -> tuple[Template, dict[str, str]] | None:
    """The row that fits the line, with its fields (those that are there), or None."""
    for row in TEMPLATES:
        for literal in row.literals:
            if literal in text:
                break
        else:
            continue
        if row.pattern is None:
            return row, {}
        found = row.pattern.search(text[:4096])
        if row.kind == "fingerprint" and found is not None:
            return row, found.groupdict() | _other_fingerprint(row.pattern, text[found.end() : 4096])
        if found is not None:
            return row, {name: value for name, value in found.groupdict().items() if value is not None}
    return None


def _other_fingerprint(pattern: re.Pattern[str], text: str) -> dict[str, str]:
    """The second rank of torch's comparison of two calls."""
    found = pattern.search(text)
    return {} if found is None else {"other": found["rank"], "theirs": found["mine"]}
