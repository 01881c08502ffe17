"""config-mismatch: ranks that should be configured alike are not.

What it does: compares, between the ranks of a data-parallel group, what each said of itself (`probes.settings`) as of
the last step that all of them finished: the optimizer's class and hyperparameters, which parameters are trained and
in which formats, whether dropout and batch norm are in training mode, the precision of products, versions, and the
user's own source files. Optimizers that hold a part of the model each (ZeRO) may have different groups and are
left out.

Why it hurts: one rank trains something else, and the average of all gradients is neither.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtobs.detectors.peers import data_groups, outliers, rows_of, tensor_groups
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

WINDOW = 64
KEPT_BY = "kept by "
_OF_AN_OPTIMIZER = ("optimizer.", "optimizer", "learning rate of group")
REPLACED = "replaced parameters"
"""The setting that names parameters which were made anew after the optimizer (`silent.optimizer_stale`)."""
COUNTED = "'s steps ahead of this run"
"""How settings end that say how far an optimizer's state counts ahead of this run (`silent.resume_mismatch`)."""
UNHELD, UNGRADED = "parameters without an optimizer", "parameters without a gradient"
"""The settings that name parameters which nothing trains (`comparisons`)."""
CLIPPING = "gradient clipping"
"""The setting that says to what norm gradients are clipped (`compare`)."""
LAYERS, NORMS = "dropout and batch-norm layers in training mode", "batch norm"
"""The settings that say how many layers are in training mode, and whose statistics batch norm takes."""
_TRAIN = "Call model.train() after each validation, on every rank."
_MAY_DIFFER = ("optimizer shares", CLIPPING, REPLACED, UNHELD, UNGRADED)
_WEAK = ("program", "Python", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")
"""Fields that can differ without harm: said as possible."""
_EACH = 8


def config_mismatch(view: RunView) -> list[Finding]:
    """One finding for each set of ranks that has other settings than its peers."""
    found: list[Finding] = []
    groups = data_groups(view) or tensor_groups(view)
    for group in groups:
        as_of = common_step(view, group)
        states = {rank: settings_of(view, rank, as_of) for rank in group} if as_of is not None else {}
        if not states or not all(states.values()):
            continue
        by_ranks: dict[tuple[tuple[int, ...], bool], list[str]] = {}
        for name in _comparable(states):
            values = {rank: state[name] for rank, state in states.items()}
            if len(set(values.values())) > 1:
                of_all = _of_all(view, name, as_of) if len(groups) > 1 else []
                odd, majority = outliers(values, of_all)
                by_ranks.setdefault((tuple(odd), majority), []).append(name)
        for (ranks, majority), names in by_ranks.items():
            found.append(_finding(ranks, majority, names, states, since(view, names, list(states), as_of or 0)))
    return found


def _of_all(view: RunView, name: str, as_of: int | None) -> list[str]:
    """The setting `name` of all ranks that have it."""
    states = [settings_of(view, rank, as_of or 0) for rank in view.ranks]
    return [state[name] for state in states if name in state]


def since(view: RunView, names: list[str], ranks: list[int], as_of: int) -> int:
    """The step since which `ranks` differ in one of `names`, as they do in step `as_of`; 0 for before the first."""
    moments = sorted({at for rank in ranks for at, _ in view.meta(rank).settings if at <= as_of}, reverse=True)
    first = as_of
    for at in moments:
        states = [settings_of(view, rank, at) for rank in ranks]
        if all(len({state.get(name) for state in states}) == 1 for name in names):
            break
        first = at
    return first


def settings_of(view: RunView, rank: int, step: int) -> dict[str, str]:
    """The settings of `rank` in `step`; empty where none were written by then."""
    state: dict[str, str] = {}
    for at, fields in view.meta(rank).settings:
        if at <= step:
            state |= fields
    return state


def is_state(name: str) -> bool:
    """Whether a setting says if an optimizer goes on from steps of its own.

    It is "kept", "empty" before its first, or begins with `KEPT_BY` where only some parameters have state.
    """
    return name.startswith("optimizer") and name.endswith(" state")


def common_step(view: RunView, group: list[int]) -> int | None:
    """The last step that every rank of `group` has finished; None before the first."""
    window = view.steps(WINDOW)
    valid = window.valid[rows_of(view, group)].all(axis=0)
    return int(window.steps[valid][-1]) if valid.any() else None


def _comparable(states: Mapping[int, Mapping[str, str]]) -> list[str]:
    shared = set.intersection(*(set(state) for state in states.values())) - set(_MAY_DIFFER)
    shared = {n for n in shared if not is_state(n) and not n.endswith(COUNTED)}  # a part of a model may have none
    if any(state.get("optimizer shares") for state in states.values()):
        shared = {name for name in shared if not name.startswith(_OF_AN_OPTIMIZER)}
    if len({state.get("program's main file") for state in states.values()}) > 1:
        shared -= {"program", "program's main file"}  # different programs by design, such as an actor and a learner
    return sorted(shared)


def _finding(
    ranks: tuple[int, ...], majority: bool, names: list[str], states: Mapping[int, Mapping[str, str]], first: int
) -> Finding:
    if LAYERS in names:  # then batch norm differs by that
        names = [LAYERS, *(name for name in names if name not in (LAYERS, NORMS))]
    strong = [name for name in names if name not in _WEAK]
    name = (strong or names)[0]
    by_then = " or before" if name == LAYERS else ""  # layers are not looked at in every step
    others = sorted(set(states) - set(ranks))
    shown = {rank: state[name] or "unset" for rank, state in states.items()}
    if majority:
        said = f"{ranks_do(ranks, 'have')} {name} {shown[ranks[0]]}, the others {shown[others[0]]}"
    else:
        said = f"{ranks_text(ranks)} differ in {name}: " + ", ".join(f"rank {r} {shown[r]}" for r in ranks[:4])
    rest = [other for other in names if other != name]
    if rest:
        said += f"; they also differ in {', '.join(rest[:4])}" + (f" and {len(rest) - 4} more" if len(rest) > 4 else "")
    return Finding(
        "config-mismatch",
        said + (f", since step {first}{by_then}" if first else ""),
        ranks,
        Confidence.CERTAIN if strong else Confidence.POSSIBLE,
        step=first,
        aspect=name,
        fault=bool(strong),
        next_step=_TRAIN if name == LAYERS else "",
        evidence=tuple(
            {
                "what": "settings",
                "name": field,
                "values": {str(rank): state[field] for rank, state in sorted(states.items())[:16]},
            }
            for field in names[:_EACH]
        ),
    )
