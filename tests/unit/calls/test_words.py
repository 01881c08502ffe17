"""The sentences about calls that findings of every source are made of."""

from __future__ import annotations

from dtobs.calls.agree import judge
from dtobs.calls.words import circle_text, mismatch_text, not_issued_text


def test_the_odd_ones_come_before_what_most_called() -> None:
    calls = {0: "all_reduce", 1: "all_reduce", 2: "broadcast"}
    found = judge(calls, 3)
    assert found is not None
    text = mismatch_text("collective-mismatch", "#5 of group a", found, calls.__getitem__)
    assert (
        text == "different collectives at #5 of group a: rank 2 called broadcast, but ranks 0 and 1 called all_reduce"
    )


def test_without_a_majority_the_ranks_disagree() -> None:
    found = judge({0: 4, 1: 5}, 2)
    assert found is not None
    text = mismatch_text("shape-mismatch", "#5 of group a", found, lambda rank: f"gather of {4 + rank}")
    assert text == ("different sizes at #5 of group a: rank 0 called gather of 4, but rank 1 called gather of 5")


def test_one_waits_and_several_wait() -> None:
    assert not_issued_text((3,), "x #2", (0,)) == "rank 3 has not issued x #2, in which rank 0 waits"
    assert not_issued_text((3, 4), "x #2", (0, 1), "a.py:1 in f") == (
        "ranks 3 and 4 have not issued x #2, in which ranks 0 and 1 wait at a.py:1 in f"
    )


def test_a_long_circle_says_how_much_of_it_is_not_shown() -> None:
    text = circle_text((((n,), f"call {n}", ((n + 1) % 6,)) for n in range(6)), odd=(2,))
    assert text.startswith("ranks wait for each other in a circle: rank 0 in call 0 for rank 1; rank 1 in call 1 for")
    assert text.endswith("for rank 4; and 2 more; rank 2 called them in another order")
