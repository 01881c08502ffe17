"""The learning rate over steps and over batch sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import ScheduleConfig
from runtime.schedule import multiplier, scaled_peak


def test_cosine_warms_up_peaks_and_ends_at_the_floor() -> None:
    config = ScheduleConfig(kind="cosine", warmup=10, floor=0.1)
    assert multiplier(1, 110, config) == pytest.approx(0.1)
    assert multiplier(10, 110, config) == 1.0
    assert multiplier(60, 110, config) == pytest.approx(0.55)
    assert multiplier(110, 110, config) == pytest.approx(0.1)


def test_wsd_stays_at_the_peak_until_the_decay() -> None:
    config = ScheduleConfig(kind="wsd", warmup=10, floor=0.0, decay=0.2)
    assert multiplier(80, 100, config) == 1.0
    assert multiplier(90, 100, config) == pytest.approx(0.5)
    assert multiplier(100, 100, config) == pytest.approx(0.0)


@given(
    st.sampled_from(["cosine", "wsd", "constant"]),
    st.integers(0, 50),
    st.integers(1, 300),
    st.floats(0.0, 1.0),
    st.data(),
)
def test_it_stays_between_zero_and_the_peak_and_falls_after_warmup(
    kind: str, warmup: int, steps: int, floor: float, data: st.DataObject
) -> None:
    config = ScheduleConfig(kind=kind, warmup=warmup, floor=floor)
    step = data.draw(st.integers(1, steps))
    value = multiplier(step, steps, config)
    assert 0.0 <= value <= 1.0
    if step > warmup:
        assert multiplier(step + 1, steps, config) <= value + 1e-12


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_scaling_with_the_global_batch(scaling: str, expected: float) -> None:
    config = ScheduleConfig(scaling=scaling, reference_batch=8)
    assert scaled_peak(1.0, 32, config) == pytest.approx(expected)
    assert scaled_peak(1.0, 8, config) == 1.0
