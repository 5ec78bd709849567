"""What the thread that takes batches has to do: no wake-ups it can spare, and no memory to give back."""

import threading
import weakref

import pytest
import torch

from knonik.batches.batch import Batch
from knonik.batches.buffers import BufferPool
from knonik.batches.handoff import Handoff

NOTHING = torch.zeros(0, dtype=torch.int64)


def batch(pool: BufferPool, number: int = 0) -> Batch:
    return Batch(
        images={"camera": pool.take((2, 8))}, state={}, action={}, action_is_pad=NOTHING, text=["", ""],
        dataset=NOTHING, episode=NOTHING, frame=NOTHING, position=NOTHING, begin=number,
    )  # fmt: skip


class Turn(threading.Condition):
    """Counts how often somebody is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes = 0

    def notify(self, n: int = 1) -> None:
        self.wakes += 1
        super().notify(n)


def full(ring: int) -> tuple[Handoff, Turn, BufferPool]:
    turn, pool = Turn(), BufferPool(keep=ring + 1)
    handoff = Handoff(ring, turn)
    for number in range(ring):
        handoff.begin()
        handoff.put(batch(pool, number))
    return handoff, turn, pool


@pytest.mark.parametrize(("ring", "wakes"), [(1, 1), (3, 3), (7, 7), (8, 7), (12, 10), (16, 13)])
def test_a_sleeping_planner_is_woken_when_a_quarter_is_free(ring: int, wakes: int) -> None:
    handoff, turn, _ = full(ring)
    handoff.planner_sleeps = True
    assert [handoff.take().begin for _ in range(ring)] == list(range(ring))
    assert turn.wakes == wakes
    assert (handoff.free, handoff.ready) == (ring, 0)


def test_a_planner_at_work_is_not_woken() -> None:
    handoff, turn, _ = full(4)
    for _ in range(4):
        handoff.take()
    assert turn.wakes == 0


def test_the_consumer_frees_nothing_and_the_planner_all() -> None:
    handoff, _, pool = full(4)
    for _ in range(3):
        handoff.take()  # and drop
    assert pool.gauges()["buffers_idle_bytes"] == 0
    handoff.begin()
    assert pool.gauges()["buffers_idle_bytes"] == 3 * 16


def test_a_batch_that_is_held_stays_whole() -> None:
    handoff, _, pool = full(8)
    held = [handoff.take() for _ in range(4)]
    pictures = [item.images["camera"].fill_(7) for item in held]
    handoff.begin()
    handoff.close()
    assert pool.gauges()["buffers_idle_bytes"] == 0
    assert all(bool((item.images["camera"] == 7).all()) for item in held)
    part = pictures[0][:1]
    held.clear()
    pictures.clear()
    assert pool.gauges()["buffers_idle_bytes"] == 3 * 16  # a view of the first is still there
    del part
    assert pool.gauges()["buffers_idle_bytes"] == 4 * 16


def test_a_consumer_that_keeps_all_batches_is_not_helped_to_more() -> None:
    """Of batches that are held, no more than two are referred to from here."""
    handoff, _, pool = full(8)
    held = [handoff.take() for _ in range(6)]
    handoff.begin()
    pictures = [weakref.ref(item.images["camera"]) for item in held]
    held.clear()
    assert sum(picture() is not None for picture in pictures) == 2
    handoff.close()
    assert pool.gauges()["buffers_idle_bytes"] == 6 * 16


def test_errors_come_in_their_place_and_stay() -> None:
    handoff, _, _ = full(1)
    handoff.fail(ValueError("no more"))
    assert handoff.take().begin == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="no more"):
            handoff.take()
    assert handoff.free == 1
