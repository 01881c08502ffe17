"""What the launcher's variables must say."""

from __future__ import annotations

import pytest

from runtime.errors import UsageError
from runtime.world import RankPlace

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_the_place_is_the_launchers_or_alone() -> None:
    assert RankPlace.of({}) == RankPlace()
    assert RankPlace.of(LAUNCHED) == RankPlace(1, 2, 1, 2)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_without_a_rendezvous_is_one_line(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        RankPlace.of({key: value for key, value in LAUNCHED.items() if key != name})
    assert str(caught.value) == (
        f"RANK is set and {name} is not: start the training with torchrun, or unset RANK to train in one process"
    )


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT"])
def test_a_number_that_is_none_is_one_line(name: str) -> None:
    with pytest.raises(UsageError, match=r"^RANK is set but the launcher's other variables are not usable: "):
        RankPlace.of(LAUNCHED | {name: "many"})
