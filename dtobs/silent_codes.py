"""The codes of silent errors: wrong numbers, wrong data, wrong randomness. Rows of `dtobs.catalogue`."""

from __future__ import annotations

from dtobs.codes import Row, Severity, Trait

ROWS: tuple[Row, ...] = (
    (
        "replica-divergence",
        "silent",
        Severity.CRITICAL,
        "Parameters that must be equal on all replicas are not",
        "Restart from a checkpoint before the first step named; where one rank is odd, suspect its memory or device.",
    ),
    (
        "corrupted-communication",
        "silent",
        Severity.CRITICAL,
        "What came out of a collective is not what went in",
        "Look for a buffer that is written before its call was waited for; where there is none, test the link and the "
        "memory of the rank named. DTOBS_PROBES=conservation=all compares every call.",
    ),
    (
        "seed-policy",
        "silent",
        Severity.WARNING,
        "Random generators are not seeded as the policy says",
        "Seed model initialisation equally on all replicas and data order and dropout by the data rank.",
    ),
    (
        "data-overlap",
        "silent",
        Severity.WARNING,
        "Ranks train on the same data",
        "Shard the data by data-parallel rank (DistributedSampler with rank and num_replicas). Where it is meant: "
        'session.policy(data="same") or dtobs run --expect same-data.',
    ),
    (
        "local-gradient-outlier",
        "silent",
        Severity.WARNING,
        "One rank's gradient is far larger or smaller than its peers'",
        "Look at this rank's batch and its loss scaling; if data is fine, suspect its device. Where each rank trains "
        'on a domain of its own: session.policy(data="own") or dtobs run --expect own-data.',
    ),
    (
        "gradients-not-synchronized",
        "silent",
        Severity.CRITICAL,
        "An optimizer does not get the gradients of all ranks",
        "Call the wrapped model itself, make every parameter before wrapping it, and check the ranks of the process "
        "group given to the wrapper.",
    ),
    (
        "accumulation-not-normalized",
        "silent",
        Severity.WARNING,
        "Accumulated micro-batches do not count as they should",
        "Zero gradients once a step, before the first micro-batch, and divide each loss by what all of them have "
        "together.",
    ),
    (
        "optimizer-stale",
        "silent",
        Severity.CRITICAL,
        "The optimizer steps and no parameter changes",
        "Make the optimizer from the parameters of the model that is trained, after moving, wrapping and loading it.",
    ),
    (
        "update-mismatch",
        "silent",
        Severity.CRITICAL,
        "The optimizer made something else of a parameter than its arithmetic says",
        "Where one rank is named, test its device; where all are, look for a learning rate captured in a compiled "
        "step or a graph, and for hooks of the step.",
    ),
    (
        "state-changed-at-rest",
        "silent",
        Severity.CRITICAL,
        "Parameters or moments changed between two steps, not by the optimizer",
        "Look for code between the steps that runs on this rank only; if there is none, test the memory of its host "
        "and device.",
    ),
    (
        "updates-lost",
        "silent",
        Severity.WARNING,
        "Most updates are lost to rounding",
        "Keep FP32 master weights, use stochastic rounding, or raise the learning rate.",
    ),
    (
        "gradient-scale-mismatch",
        "silent",
        Severity.CRITICAL,
        "Gradients are multiplied by factors that differ between ranks or are not meant",
        "Clip by the norm over all shards (clip_grad_norm_ over the wrapped model), unscale on every rank before "
        "clipping, and reduce with one operation everywhere.",
    ),
    (
        "gradient-nonfinite",
        "silent",
        Severity.CRITICAL,
        "A gradient holds NaN or infinity",
        "Look at the module named, on the rank named, with this step's batch; skip the step until it is fixed.",
        Trait.RAISES,
    ),
    (
        "loss-nonfinite",
        "silent",
        Severity.CRITICAL,
        "The loss is NaN or infinity",
        "Look at this rank's batch of this step; lower the learning rate or clip if gradients grew before.",
        Trait.RAISES,
    ),
    (
        "loss-spike",
        "silent",
        Severity.WARNING,
        "The loss leapt out of what it was and came back",
        "Look at the batch of this step; clip gradients or lower the learning rate if it happens again.",
    ),
    (
        "gradient-spike",
        "silent",
        Severity.WARNING,
        "The gradient norm leapt to many times what it was",
        "Clip gradients by their global norm, and look at the batch of this step.",
    ),
    (
        "fp16-underflow",
        "silent",
        Severity.WARNING,
        "FP16 loses gradients: its loss scale collapsed, or most of them are zero",
        "Train in BF16; or raise the loss scale where gradients are zero, and find what overflows where it fell.",
    ),
    (
        "fp8-saturation",
        "silent",
        Severity.WARNING,
        "FP8 loses numbers: they saturate, or most of them become zero",
        "Leave the layers with outliers in BF16, scale by row, or scale by the present amax, not by an older one.",
    ),
    (
        "config-mismatch",
        "silent",
        Severity.WARNING,
        "A rank is configured otherwise than its peers",
        "Look for a branch on the rank, an environment variable, or a file that only some hosts have.",
    ),
    (
        "learning-rate-mismatch",
        "silent",
        Severity.CRITICAL,
        "Ranks step with different learning rates",
        "Give every rank the same schedule and step it on every rank; after a resume, load its state on all of them.",
    ),
    (
        "data-repeat",
        "silent",
        Severity.WARNING,
        "Every epoch reads shuffled data in the same order",
        "Call sampler.set_epoch(epoch) at the beginning of every epoch.",
    ),
    (
        "data-uneven",
        "silent",
        Severity.WARNING,
        "Ranks train on batches of different size",
        "Give every rank the same batch size, or weigh each loss by its share of all samples.",
    ),
    (
        "data-mismatch",
        "silent",
        Severity.CRITICAL,
        "Ranks of one model replica read different data",
        "Seed and shard the data by the data-parallel place only, or broadcast each batch within the group.",
    ),
    (
        "data-not-resumed",
        "silent",
        Severity.WARNING,
        "A restart begins the data anew",
        "Save the position in the data with the checkpoint, and skip to it after a restart.",
    ),
    (
        "rng-not-restored",
        "silent",
        Severity.WARNING,
        "A restart continues the data with other random numbers",
        "Save and load the states of the generators of every rank, host and device, with the checkpoint.",
    ),
    (
        "resume-mismatch",
        "silent",
        Severity.CRITICAL,
        "A restart goes on with another learning rate or other weights",
        "Load the state of model, optimizer, scheduler and scaler on every rank before the first step.",
    ),
    (
        "checkpoint-corrupt",
        "silent",
        Severity.CRITICAL,
        "A checkpoint is not what was saved",
        "Go on from another one, or copy it again from where it was written; look at the host's disk and memory.",
    ),
    (
        "checkpoint-failed",
        "silent",
        Severity.WARNING,
        "A checkpoint could not be saved",
        "Make room, or save to another place; look for what the failed save left behind before you resume from it.",
    ),
    (
        "checkpoint-race",
        "silent",
        Severity.CRITICAL,
        "Several ranks write over one checkpoint file",
        "Write it from one rank only, or a file for each rank; write beside its place and rename it when it is whole.",
    ),
    (
        "logging-from-all-ranks",
        "silent",
        Severity.WARNING,
        "Several ranks write over one file",
        "Write logs from rank 0 only, or a file for each rank; or open the file for appending.",
    ),
    # the end of the silent ones
)
"""One a code."""
