"""What the forkserver imports: most of what ranks use of torch, of dtobs and of the runtime.

It is frozen then: a rank that looks through all objects, as the garbage collector and dtobs do, would get pages of its
own for them.
"""

import gc

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # the first step of an optimizer imports it: 1.5 s in every rank otherwise
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import dtobs.session.session
import dtobs.session.start  # noqa: F401
import runtime.train  # noqa: F401
from dtobs.probes.table import PROBES

for entry in PROBES:
    entry.make()

gc.collect()
gc.freeze()
