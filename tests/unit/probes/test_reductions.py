"""Whose copies are learned from reductions of gradients, and of which nothing is."""

from __future__ import annotations

import torch

from dtobs.probes.layout import Named
from dtobs.probes.reductions import STEPS, Reductions
from dtobs.recording.meta import Parameter

PAIR, ALL = (0, 1), (0, 1, 2, 3)


def tensors(count: int) -> list[Named]:
    made = [torch.nn.Parameter(torch.zeros(3, n + 2)) for n in range(count)]
    return [Named(str(n), t, Parameter(str(n), tuple(t.shape), "float32")) for n, t in enumerate(made)]


def learned(named: list[Named], reduce, steps: int = STEPS, wanted: tuple[int, ...] | None = None, masters=dict):
    """What has learned where `reduce(reductions, gradients, step)` tells of the calls of each step."""
    rows = tuple(range(len(named))) if wanted is None else wanted
    reductions = Reductions(named, rows, masters)
    for step in range(steps):
        for each in named:
            each.tensor.grad = torch.ones_like(each.tensor)
        reduce(reductions, [each.tensor.grad for each in named], step)
        if reductions.stepped(set()):
            break
    return reductions


def test_a_gradient_reduced_over_one_group_before_every_step():
    def reduce(reductions, gradients, step):
        reductions.reduced([gradients[0]], PAIR)
        reductions.reduced([gradients[1].data], ALL)

    assert learned(tensors(3), reduce).found() == {0: PAIR, 1: ALL}


def test_a_gradient_reduced_over_several_groups_now_and_then_or_by_one_rank_tells_nothing():
    def reduce(reductions, gradients, step):
        for group in (PAIR, ALL):
            reductions.reduced([gradients[0]], group)
        reductions.reduced([gradients[1]], PAIR if step % 2 else ALL)
        if step % 2:
            reductions.reduced([gradients[2]], PAIR)
        reductions.reduced([gradients[3]], (2,))

    assert learned(tensors(4), reduce).found() == {}


def test_gradients_that_are_reduced_by_their_maximum():
    named = tensors(2)
    by_maximum, checked, now_and_then = (Reductions(named, (0, 1)) for _ in range(3))
    for step in range(STEPS):
        for each in named:
            each.tensor.grad = torch.ones_like(each.tensor)
        by_maximum.otherwise([named[1].tensor.grad], PAIR, "max")
        checked.otherwise([torch.ones(3)], PAIR, "max")  # a flag, as a scaler's
        checked.otherwise([named[0].tensor.grad], PAIR, "max")
        checked.reduced([named[0].tensor.grad], PAIR)
        if step % 4 == 0:
            now_and_then.otherwise([named[0].tensor.grad], PAIR, "max")
        for each in (by_maximum, checked, now_and_then):
            each.stepped(set())
    assert by_maximum.found_otherwise() == ("max", 1)
    assert checked.found_otherwise() is None
    assert now_and_then.found_otherwise() is None


def test_what_an_optimizer_reduces_in_its_step_is_told_apart():
    named = tensors(2)
    reductions = Reductions(named, (0, 1))
    for each in named:
        each.tensor.grad = torch.ones_like(each.tensor)
    reductions.reduced([named[0].tensor.grad], ALL)
    reductions.reduced([named[1].tensor.grad], ALL, elsewhere=True)
    assert reductions.within == {1}


def test_what_is_no_gradient_tells_nothing():
    def reduce(reductions, gradients, step):
        for gradient in gradients:
            reductions.reduced([gradient.clone()], ALL)
        reductions.reduced([torch.zeros(3, 2)], ALL)

    assert learned(tensors(3), reduce).found() == {}


def test_one_buffer_of_all_gradients_is_known_by_its_size():
    def reduce(reductions, gradients, step):
        reductions.reduced([torch.cat([g.flatten() for g in gradients])], PAIR)

    assert learned(tensors(3), reduce).found() == {0: PAIR, 1: PAIR, 2: PAIR}
    assert learned(tensors(3), reduce, wanted=(1,)).found() == {1: PAIR}

    def early(reductions, gradients, step):
        """What DDP reduces in the backward, when the gradients of what it does not wrap are not there."""
        reductions._tensors[2].tensor.grad = None
        reductions.reduced([torch.cat([g.flatten() for g in gradients[:2]])], PAIR)

    assert learned(tensors(3), early).found() == {}
    assert learned(tensors(1), reduce).found() == {}, "a clone of one gradient may be for anything"


def test_few_steps_tell_nothing_and_what_is_learned_is_learned_once():
    def reduce(reductions, gradients, step):
        for gradient in gradients:
            reductions.reduced([gradient], PAIR)

    assert learned(tensors(2), reduce, steps=2).found() == {}
    assert learned(tensors(2), reduce, steps=3).found() == {0: PAIR, 1: PAIR}


def test_of_two_optimizers_each_tells_of_its_own_parameters():
    named = tensors(2)
    reductions = Reductions(named, (0, 1))
    for each in named:
        each.tensor.grad = torch.ones_like(each.tensor)
    for _ in range(3):
        for each in named:
            reductions.reduced([each.tensor.grad], PAIR)
            done = reductions.stepped({id(other.tensor) for other in named if other is not each})
    assert reductions.found() == {0: PAIR, 1: PAIR}
    assert done


def test_a_buffer_where_an_earlier_gradient_was_is_a_buffer():
    named = tensors(2)

    def reduce(reductions, gradients, step):
        reductions.reduced([torch.ones(5)], ALL)  # a loss, while the gradients of the step before are still there
        for each in named:
            each.tensor.grad = torch.ones_like(each.tensor)
        reductions.reduced([gradients[0].flatten()], PAIR)  # the memory of one of them, and as much
        reductions.reduced([torch.ones(named[1].tensor.numel())], PAIR)

    assert learned(named, reduce).found() == {0: PAIR, 1: PAIR}


def test_gradients_of_master_copies_stand_for_those_of_the_model():
    named = tensors(3)
    masters = [named[row].tensor.detach().double().requires_grad_() for row in range(3)]

    def reduce(reductions, gradients, step):
        for row, master in enumerate(masters):
            master.grad = gradients[row].double()
        reductions.reduced([masters[0].grad], PAIR)
        reductions.reduced([masters[1].grad], ALL)
        reductions.reduced([gradients[2]], ALL)  # before it is copied to its master

    found = learned(named, reduce, masters=lambda: dict(enumerate(masters)))
    assert found.found() == {0: PAIR, 1: ALL, 2: ALL}
    assert found.within == {0, 1}


def test_shares_of_a_buffer_with_all_gradients():
    named = tensors(3)  # of 6, 9 and 12 elements

    def reduce(share, calls=1):
        return lambda reductions, gradients, step: [
            reductions.scattered([torch.ones(share)], PAIR) for _ in range(calls)
        ]

    found = learned(named, reduce(14))
    assert found.found() == {0: PAIR, 1: PAIR, 2: PAIR}  # 27, padded to two shares
    assert found.within == {0, 1, 2}
    assert learned(named, reduce(7, calls=2)).found() == found.found()  # in two buckets
    assert learned(named, reduce(10)).found() == {}  # of something else
    assert learned(named, reduce(40)).found() == {}


def test_what_is_reduced_to_the_rank_that_trains_it_is_whole_on_no_other():
    def reduce(reductions, gradients, step):
        for gradient in gradients:
            reductions.reduced([gradient], PAIR, elsewhere=True)

    found = learned(tensors(2), reduce)
    assert found.found() == {0: PAIR, 1: PAIR}
    assert found.within == {0, 1}
