"""What can go wrong, as types.

TrainingError                 anything this package raises on purpose; its text is one clear line
├── UsageError                a flag, file or environment variable is wrong (exit code 2, before any process group)
│   └── LayoutError           the requested parallel layout cannot be built on this world
├── DataError                 a corpus or tokenizer cannot be used
├── CheckpointError           a checkpoint cannot be written, trusted or loaded
├── ProofError                the layout computes other gradients than one rank does
└── NonFiniteError            too many steps in a row had gradients that are not finite

SaveWarning                   a checkpoint was not written, or an old one not removed, and training goes on; its text is
                              one clear line
"""

from __future__ import annotations


class TrainingError(Exception):
    """Base of every error this package raises on purpose."""


class UsageError(TrainingError):
    """The request itself is wrong; nothing was started."""


class LayoutError(UsageError):
    """The requested parallel layout is impossible; the text names numbers that would work."""


class DataError(TrainingError):
    """A corpus, tokenizer or token file is missing, empty, or not what it claims to be."""


class CheckpointError(TrainingError):
    """A checkpoint could not be saved, verified or loaded."""


class NonFiniteError(TrainingError):
    """Gradients stayed non-finite for the permitted number of steps in a row."""


class ProofError(TrainingError):
    """A layout computes other gradients than one rank does."""


class SaveWarning(UserWarning):
    """A checkpoint could not be saved, or an old one not removed; training goes on."""
