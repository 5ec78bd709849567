"""Pictures held between batches: each GOP decoded once, nothing kept longer than wanted."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from knonik.batches.hold import Hold

KEY = (0, "camera", "object", 3)


class Decoder:
    """Counts what is decoded; the picture of a frame is filled with its number."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, numbers: Sequence[int], out: Sequence[np.ndarray]) -> None:
        self.calls.append(sorted(numbers))
        for number, array in zip(numbers, out, strict=True):
            array[...] = number


def pictures(count: int) -> list[np.ndarray]:
    return [np.full((2, 3), 255, np.uint8) for _ in range(count)]


def take(hold: Hold, numbers: list[int], decode: Decoder) -> list[int]:
    out = pictures(len(numbers))
    hold.take(KEY, numbers, out, decode)
    assert all((picture == picture[0, 0]).all() for picture in out)
    return [int(picture[0, 0]) for picture in out]


def test_a_gop_is_decoded_for_all_batches_at_once() -> None:
    hold, decode = Hold(), Decoder()
    batches = [[5, 2], [2, 2, 9], [9, 5]]
    assert [hold.expect(KEY, numbers) for numbers in batches] == [True, False, False]
    assert take(hold, batches[0], decode) == [5, 2]
    assert hold.gauges()["hold_bytes"] == 3 * 6  # 2, 9 and 5 for the others
    assert take(hold, batches[1], decode) == [2, 2, 9]
    assert hold.gauges()["hold_bytes"] == 2 * 6
    assert take(hold, batches[2], decode) == [9, 5]
    assert decode.calls == [[2, 5, 9]]
    assert hold.gauges() == {"hold_bytes": 0, "hold_peak_bytes": 18, "hold_decodes": 1, "hold_frames": 7}
    assert hold.expect(KEY, [5])  # forgotten: it would be decoded again


def test_what_is_planned_while_its_gop_is_being_decoded_needs_packets() -> None:
    hold, decode = Hold(), Decoder()
    hold.expect(KEY, [1])
    hold.expect(KEY, [4])

    def slow(numbers: Sequence[int], out: Sequence[np.ndarray]) -> None:
        assert not hold.expect(KEY, [4])  # on its way
        assert hold.expect(KEY, [6])  # too late for this decoding
        decode(numbers, out)

    hold.take(KEY, [1], pictures(1), slow)
    assert [take(hold, numbers, decode) for numbers in ([4], [4], [6])] == [[4], [4], [6]]
    assert decode.calls == [[1, 4], [6]]


def test_what_was_planned_too_late_is_decoded_again() -> None:
    hold, decode = Hold(), Decoder()
    hold.expect(KEY, [1])
    hold.expect(KEY, [4])
    take(hold, [1], decode)
    assert not hold.expect(KEY, [4])
    assert hold.expect(KEY, [6])
    assert [take(hold, numbers, decode) for numbers in ([4], [4], [6])] == [[4], [4], [6]]
    assert decode.calls == [[1, 4], [6]]
    assert hold.gauges()["hold_bytes"] == 0


def test_a_failure_leaves_the_other_batches_their_turn() -> None:
    hold, decode = Hold(), Decoder()

    def fail(numbers: Sequence[int], out: Sequence[np.ndarray]) -> None:
        raise RuntimeError("damaged")

    hold.expect(KEY, [1])
    hold.expect(KEY, [1, 2])
    with pytest.raises(RuntimeError, match="damaged"):
        hold.take(KEY, [1], pictures(1), fail)
    assert take(hold, [1, 2], decode) == [1, 2]
    assert hold.gauges()["hold_bytes"] == 0


def test_threads_wait_for_the_one_that_decodes() -> None:
    hold, decode = Hold(), Decoder()
    for number in range(8):
        hold.expect(KEY, [number])
    results: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=number: results.__setitem__(n, take(hold, [n], decode))) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number] for number in range(8)}
    assert decode.calls == [list(range(8))]
