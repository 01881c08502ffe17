"""checkpoint-race: a thread saved the tensors that are trained while the optimizer went on with them.

What it does: reads what each rank recorded of saves in another thread than the one that trains (`probes.saves`), whose
tensors lay in the memory of parameters or of the optimizer's state, and during which the optimizer stepped.

Why it hurts: the file has some tensors of one step and some of the next, or a tensor of both. It loads, and the
training that goes on from it is one that never was.
"""

from __future__ import annotations

from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Torn
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text


def torn_checkpoints(view: RunView) -> list[Finding]:
    """At most one finding, of all ranks that saved so."""
    torn: dict[int, Torn] = {rank: said[0] for rank in view.ranks if (said := view.meta(rank).torn)}
    if not torn:
        return []
    rank = min(torn, key=lambda each: torn[each].step)
    first, sites = torn[rank], view.meta(rank).sites
    site = f" (at {line})" if (line := sites.get(first.site)) is not None and line.line else ""
    copied = f"{count(first.live, 'tensor')} of it {'was' if first.live == 1 else 'were'} no copy but what is trained"
    return [
        Finding(
            "checkpoint-race",
            f"{ranks_text(torn)} saved {first.path or 'a checkpoint'} in another thread{site} while the optimizer"
            f" stepped {count(first.times, 'time')}, in step {first.step} and after it: {copied}, so it may hold parts"
            " of several steps",
            tuple(torn),
            Confidence.LIKELY,
            step=first.step,
            aspect="torn",
            next_step="Copy the tensors before the thread begins ({name: t.detach().clone() …}), or use"
            " torch.distributed.checkpoint.async_save.",
            evidence=tuple(
                {"what": "save beside the training", "rank": r, "path": t.path, "tensors": t.live, "times": t.times}
                for r, t in list(torn.items())[:16]
            ),
        )
    ]
