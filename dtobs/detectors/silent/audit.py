"""The optimizer's step computed again from the windows that ranks copied around it. Pure arithmetic.

What AdamW, Adam and SGD do is computed in FP64 from what the optimizer found, with tolerances from the parameter's
format. A gradient may still be changed inside the step (a scaler that divides there, a hook that clips): for Adam the
gradient that was really used follows from the first moment, and the second one must agree with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.recording.laws import UPDATES, WINDOW, Update
from dtobs.recording.view import RunView

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_EPS = {"float64": 2.0**-44, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_TINY = {"float64": 2.3e-308, "float32": 1.2e-38, "float16": 6.2e-5, "bfloat16": 1.2e-38}
_BITS = {"float64": (64, 52), "float32": (32, 23), "float16": (16, 10), "bfloat16": (16, 7)}
SLACK = 8.0
"""Roundings that an implementation may add up, in units of the format's own."""
SAME_RATIO = 0.02
"""How far the elements of a window may be apart for their ratio to count as one number."""


@dataclass(frozen=True)
class Audit:
    """The windows of what one optimizer of a rank trains: `records` of UPDATES (N of them), and what they are of."""

    rank: int
    kind: str
    names: list[str]
    dtypes: list[str]
    records: npt.NDArray[np.void]

    def __len__(self) -> int:
        return len(self.records)

    def name(self, n: int) -> str:
        """The parameter of window `n`."""
        return self.names[int(self.records["row"][n])]

    @cached_property
    def inside(self) -> Bools:
        """bool[N, WINDOW]: which elements there are."""
        return np.arange(WINDOW) < self.records["count"][:, None]

    @cached_property
    def before(self) -> Floats:
        """float64[N, 4, WINDOW]: parameter, gradient and both moments as the optimizer found them."""
        return np.asarray(self.records["before"].reshape(-1, 4, WINDOW), np.float64)

    @cached_property
    def after(self) -> Floats:
        """float64[N, 3, WINDOW]: parameter and moments just after the optimizer stepped."""
        return np.asarray(self.records["after"].reshape(-1, 3, WINDOW), np.float64)

    @cached_property
    def rest(self) -> Floats:
        """float64[N, 3, WINDOW]: parameter and moments just before the optimizer's next step."""
        return np.asarray(self.records["rest"].reshape(-1, 3, WINDOW), np.float64)

    def _of_row(self, table: dict[str, float]) -> Floats:
        values = np.array([table.get(dtype, np.nan) for dtype in self.dtypes])
        return np.asarray(values[self.records["row"]][:, None])

    @cached_property
    def eps(self) -> Floats:
        """float64[N, 1]: the relative spacing of the parameter's format."""
        return self._of_row(_EPS)

    @cached_property
    def _tiny(self) -> Floats:
        return self._of_row(_TINY)

    @cached_property
    def moved(self) -> Bools:
        """bool[N]: whether any element of the parameter or of its moments changed in the step."""
        old = self.before[:, (0, 2, 3)]
        return np.asarray(((old != self.after) & ~(np.isnan(old) & np.isnan(self.after))).any(axis=(1, 2)))

    @cached_property
    def _gradient(self) -> Floats:
        """What the optimizer makes of the gradient first: its sign, and weight decay that is a part of it."""
        flags = self.records["flags"][:, None]
        g = np.where(flags & Update.MAXIMIZE, -self.before[:, 1], self.before[:, 1])
        coupled = np.where(flags & Update.DECOUPLED, 0.0, self.records["weight_decay"][:, None])
        return np.asarray(g + np.nan_to_num(coupled) * self.before[:, 0])

    @cached_property
    def step_wanted(self) -> Floats:
        """float64[N, WINDOW]: by how much the parameter should have changed, given the moments it was left with."""
        r, theta = self.records, self.before[:, 0]
        lr, decay = r["lr"][:, None], np.nan_to_num(r["weight_decay"][:, None])
        with np.errstate(all="ignore"):
            if self.kind == "adam":
                done = r["done"][:, None] + 1.0
                m, v = self.after[:, 1], self.after[:, 2]
                root = np.sqrt(v / (1.0 - r["beta2"][:, None] ** done)) + r["eps"][:, None]
                apart = np.where(r["flags"][:, None] & Update.DECOUPLED, decay, 0.0)
                return np.asarray(-lr * (m / (1.0 - r["beta1"][:, None] ** done) / root + apart * theta))
            momentum = np.nan_to_num(r["beta1"][:, None])
            buffer = np.where(momentum != 0.0, self.after[:, 1], 0.0)
            nesterov = (r["flags"][:, None] & Update.NESTEROV) != 0
            used = np.where(nesterov, self._gradient + momentum * buffer, buffer)
            return np.asarray(-lr * np.where(momentum != 0.0, used, self._gradient))

    @cached_property
    def theta_off(self) -> Floats:
        """float64[N, WINDOW]: how far elements of the parameter are from where the arithmetic leads.

        In units of what roundings may leave; NaN where that arithmetic is not known.
        """
        theta, now, wanted = self.before[:, 0], self.after[:, 0], self.step_wanted
        rough = np.maximum(1e-3, 4 * SLACK * self.eps) * np.abs(wanted)
        allowed = SLACK / 2 * self.eps * (np.abs(theta) + np.abs(wanted)) + rough + self._tiny
        known = ((self.records["flags"] & Update.AMSGRAD) == 0)[:, None] | (self.kind != "adam")
        with np.errstate(all="ignore"):
            return np.where(known & self.inside, np.abs(now - theta - wanted) / allowed, np.nan)

    @cached_property
    def theta_wrong(self) -> Bools:
        """bool[N, WINDOW]: elements of the parameter that are not where the arithmetic leads."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.theta_off > 1)

    @cached_property
    def state_wrong(self) -> Bools:
        """bool[N, WINDOW]: elements whose moments follow from no gradient at all; of SGD none can be told."""
        if self.kind != "adam":
            return np.zeros((len(self), WINDOW), bool)
        r, eps = self.records, self.eps
        b1, b2 = r["beta1"][:, None], r["beta2"][:, None]
        m, v = (np.nan_to_num(self.before[:, n]) for n in (2, 3))
        m_now, v_now = self.after[:, 1], self.after[:, 2]
        with np.errstate(all="ignore"):
            g, blur = self._gradient, 0.0 * eps
            off = np.abs(m_now - b1 * m - (1 - b1) * g) > SLACK * eps * (np.abs(m) + np.abs(g)) + self._tiny
            implied = (m_now - b1 * m) / (1 - b1)
            blur = np.where(off, SLACK * eps * (np.abs(m) + np.abs(m_now)) / (1 - b1) + self._tiny, blur)
            g = np.where(off, implied, g)
            allowed = SLACK * eps * (np.abs(v) + (1 - b2) * g * g) + (1 - b2) * (2 * np.abs(g) * blur + blur * blur)
            return np.asarray(self.inside & (np.abs(v_now - b2 * v - (1 - b2) * g * g) > allowed + self._tiny))

    @cached_property
    def ratio(self) -> Floats:
        """float64[N]: how many times as far as it should the parameter moved, where that is one number; else NaN."""
        wanted = np.where(self.inside, self.step_wanted, 0.0)
        done = np.where(self.inside, self.after[:, 0] - self.before[:, 0], 0.0)
        clear = self.inside & (np.abs(wanted) > 100 * self.eps * np.abs(self.before[:, 0])) & (wanted != 0)
        found = np.full(len(self), np.nan)
        for n in np.flatnonzero(clear.sum(axis=1) >= 4):
            each = done[n][clear[n]] / wanted[n][clear[n]]
            middle = float(np.median(each))
            if np.abs(each - middle).max() <= SAME_RATIO * abs(middle):
                found[n] = middle
        return found

    @cached_property
    def lost(self) -> Bools:
        """bool[N]: there was something to add, nearly all of it below half a unit in the last place, and none moved."""
        theta, wanted = np.abs(self.before[:, 0]), np.abs(self.step_wanted)
        small = (wanted < self.eps / 4 * theta) & (wanted > 0) & self.inside
        there = self.inside & (wanted > 0)
        still = ((self.after[:, 0] == self.before[:, 0]) | ~self.inside).all(axis=1)
        return np.asarray(still & (small.sum(axis=1) >= 0.9 * self.inside.sum(axis=1)) & there.any(axis=1))

    @cached_property
    def changed_at_rest(self) -> Bools:
        """bool[N, 3, WINDOW]: elements of parameter and moments that something else than the optimizer wrote."""
        different = (self.after != self.rest) & ~(np.isnan(self.after) & np.isnan(self.rest))
        return np.asarray(different & self.inside[:, None])

    @cached_property
    def drifted(self) -> Bools:
        """bool[N, 3]: parts of which the sum of words changed between the step and the next."""
        return np.asarray((self.records["drift"] != 0) & (self.records["summed"] > 0)[:, None])

    def flipped_bit(self, n: int, part: int) -> int | None:
        """Which bit of one element alone has changed in that part of window `n`, as the sum of its words says."""
        drift = abs(int(self.records["drift"][n][part]))
        if not drift or drift & (drift - 1):
            return None
        return (drift.bit_length() - 1) % self.bits(n)[0]

    def bits(self, n: int) -> tuple[int, int]:
        """Of an element of window `n`, and those of its mantissa."""
        return _BITS.get(self.dtypes[int(self.records["row"][n])], (64, 52))


Window = tuple[Audit, int]


def copies(view: RunView, found: list[Audit]) -> Iterator[tuple[str, int, list[Window]]]:
    """Parameter, step and the windows of all ranks that hold equal values of that place; only where there are two."""
    together: dict[tuple[str, str, int, int, int], list[Window]] = {}
    for audit in found:
        keys = {p.name: p.replica for p in view.meta(audit.rank).params}
        records = audit.records
        for n, (step, first, count) in enumerate(records[["step", "first", "count"]].tolist()):
            name = audit.name(n)
            if keys.get(name):
                together.setdefault((name, keys[name], step, first, count), []).append((audit, n))
    for (name, _, step, _, _), windows in sorted(together.items(), key=lambda item: item[0][2]):
        if len(windows) > 1:
            yield name, step, windows


def audits(view: RunView) -> list[Audit]:
    """What each rank looked at, by optimizer; ranks without an entry, or with a damaged one, are left out."""
    if UPDATES.name not in view.shared:
        view.shared[UPDATES.name] = _audits(view)
    found: list[Audit] = view.shared[UPDATES.name]
    return found


def _audits(view: RunView) -> list[Audit]:
    found = []
    for rank in view.ranks:
        entry: dict[str, Any] = view.meta(rank).laws.get(UPDATES.name, {})
        try:
            names, dtypes = [str(n) for n in entry["rows"]], [str(d) for d in entry["dtypes"]]
            since, kinds = int(entry.get("since", 0)), {str(n): str(kind) for n, kind in entry["kinds"].items()}
            of = np.array([int(number) for number in entry["optimizers"]], np.int64)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            continue
        if not len(names) == len(dtypes) == len(of):
            continue
        records = view.law(UPDATES, rank)
        good = (records["step"] >= since) & (records["row"] < len(names)) & (records["count"] <= WINDOW)
        records = records[good]
        for number in np.unique(of[records["row"]]).tolist():
            mine = records[of[records["row"]] == number]
            found.append(Audit(rank, kinds.get(str(number), ""), names, dtypes, mine))
    return found
