"""What a job may do on purpose although it looks like a mistake, and the words that declare it.

``session.policy(expect="same-data")`` and ``dtobs run --expect same-data`` say the same. Before it is declared, a
finding says the words in its next step, and is a note where no more than its possibility is known; afterwards it is not
told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Expectation:
    """`rules` are what ``session.policy`` records for the word; `says` completes "the job declares that …".

    What `costs` time or memory, meant or not, is told as a warning.
    """

    says: str
    rules: Mapping[str, Any]
    costs: bool = False


def _itself(code: str, says: str, *, costs: bool = False) -> tuple[str, Expectation]:
    """A word that is the name of the only code it is about."""
    return code, Expectation(says, {code: "expected"}, costs)


EXPECTATIONS: dict[str, Expectation] = dict(
    (
        ("same-data", Expectation("ranks read the same data", {"data": "same"})),
        ("own-data", Expectation("each rank reads a domain of its own", {"data": "own"})),
        ("uneven-data", Expectation("ranks have batches of different size", {"batches": "uneven"})),
        ("same-seed", Expectation("ranks draw the same random numbers", {"generators": "equal"})),
        ("same-order", Expectation("every epoch reads the data in one order", {"order": "same"})),
        ("own-models", Expectation("each rank's copy of the model goes its own way", {"models": "own"})),
        ("own-settings", Expectation("ranks are configured differently", {"settings": "own"})),
        ("own-updates", Expectation("a hook changes what the optimizer does", {"updates": "own"})),
        ("own-accumulation", Expectation("gradients are kept, zeroed and summed as they are", {"accumulation": "own"})),
        ("loss-weights", Expectation("losses are weighted as they are", {"token_weights": True})),
        ("own-statistics", Expectation("batch norm normalises by each rank's own samples", {"statistics": "own"})),
        ("own-rate", Expectation("the learning rate does not follow the number of ranks", {"rate": "own"})),
        ("fresh-restart", Expectation("a restart begins data, seeds or schedule anew", {"restart": "fresh"})),
        _itself("sync-every-microbatch", "gradients are reduced after every micro-batch"),
        _itself("memory-near-limit", "devices are filled to their limit"),
        _itself("memory-imbalance", "ranks hold different amounts of memory"),
        _itself("memory-leak", "memory grows, such as that of a replay buffer", costs=True),
        _itself("stage-imbalance", "pipeline stages differ in length", costs=True),
        _itself("checkpoint-stall", "checkpoints are written often, and waited for"),
        _itself("data-starved", "steps wait for data that is made meanwhile", costs=True),
        _itself("throughput-drop", "later steps do more work than earlier ones", costs=True),
        _itself("straggler", "a rank does more than its peers", costs=True),
    )
)
"""By word. `Code.expect` names the one that a code's findings are declared by."""


def is_declared(word: str, policy: Mapping[str, Any]) -> bool:
    """Whether the rules that a rank recorded (`RunMeta.policy`) include those of `word`."""
    return all(policy.get(name) == value for name, value in EXPECTATIONS[word].rules.items())


def rules_of(words: str | list[str] | tuple[str, ...]) -> dict[str, Any]:
    """The rules of one word or several. Raises ValueError for a word there is not."""
    found: dict[str, Any] = {}
    for word in (words,) if isinstance(words, str) else words:
        if word not in EXPECTATIONS:
            raise ValueError(f"nothing can be declared by {word!r}: the words are {', '.join(EXPECTATIONS)}")
        found |= EXPECTATIONS[word].rules
    return found


def how_to_declare(word: str) -> str:
    """The sentence that a finding ends with."""
    return f'Where it is meant: session.policy(expect="{word}") or dtobs run --expect {word}.'
