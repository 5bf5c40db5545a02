"""What a deal by speed has brought is told with the straggler: iterations before, since, and what was possible."""

from __future__ import annotations

from unicrond.agents.trainer.detection.deal_effect import ENOUGH, SETTLING, DealEffect
from unicrond.agents.trainer.lifecycle.deal import Deal
from unicrond.agents.trainer.lifecycle.programme import Speeds
from unicrond.events.vocabulary import ReplicaDeal

EVEN = Deal(Speeds((100, 100, 100)), (4, 4, 4))
UNEVEN = Deal(Speeds((100, 200, 100)), (5, 2, 5), ordinary_us=40_000)


def committed(effect: DealEffect, deal: Deal, durations_us: list[int]) -> list[bool]:
    return [effect.add(deal.counts, deal, duration_us) for duration_us in durations_us]


def test_deal_effect_compares_iterations_before_and_since() -> None:
    effect = DealEffect()
    assert not any(committed(effect, EVEN, [366_000] * 23))
    assert effect.of(1, EVEN) is None
    known = committed(effect, UNEVEN, [900_000] * SETTLING + [246_000] * 20)
    assert known.count(True) == 1 and known.index(True) == SETTLING + 7
    assert effect.of(1, UNEVEN) == ReplicaDeal(
        micro_batches=12, dealt=2, dealt_evenly=4, iteration_us_before=366_000, iteration_us=246_000, ideal_us=246_000
    )


def test_what_is_not_known_yet_is_0() -> None:
    effect = DealEffect()
    committed(effect, UNEVEN, [246_000] * (SETTLING + ENOUGH - 1))
    deal = effect.of(1, UNEVEN)
    assert deal is not None, "a group may begin with it"
    assert (deal.iteration_us_before, deal.iteration_us, deal.ideal_us) == (0, 0, 0)


def test_iterations_that_say_nothing_do_not_count() -> None:
    effect = DealEffect()
    committed(effect, EVEN, [360_000] * 9)
    effect.add((6, 0, 6), EVEN, 10**9)  # healed in between
    committed(effect, EVEN, [0])  # with a checkpoint
    committed(effect, UNEVEN, [240_000] * 9)
    deal = effect.of(0, UNEVEN)
    assert deal is not None and deal.iteration_us_before == 360_000


def test_second_move_is_compared_with_even_deal() -> None:
    effect = DealEffect()
    committed(effect, EVEN, [360_000] * 9)
    committed(effect, Deal(UNEVEN.speeds, (5, 3, 4)), [300_000] * 9)
    committed(effect, UNEVEN, [240_000] * 9)
    deal = effect.of(1, UNEVEN)
    assert deal is not None and (deal.iteration_us_before, deal.iteration_us) == (360_000, 240_000)
