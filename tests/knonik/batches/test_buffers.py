"""Memory of batches is used again when nobody refers to it, and never before."""

import gc
import threading

import numpy as np
import torch

from knonik.batches.buffers import BufferPool


def counts(pool: BufferPool) -> tuple[float, float, float]:
    gauges = pool.gauges()
    return gauges["buffers_allocated"], gauges["buffers_recycled"], gauges["buffers_idle_bytes"]


def test_memory_is_used_again_after_the_last_reference() -> None:
    pool = BufferPool(keep=2)
    first = pool.take((4, 6))
    address = first.data_ptr()
    view = first.view(24)[3:5]
    array = view.numpy()
    part = array[:1]
    del first, view, array
    gc.collect()
    assert counts(pool) == (1, 0, 0)  # an element of a view of it is still held
    del part
    assert counts(pool) == (1, 0, 24)
    assert pool.take((24,)).data_ptr() == address
    assert counts(pool)[:2] == (1, 1)


def test_other_sizes_and_types_are_apart() -> None:
    pool = BufferPool(keep=2)
    del_me = pool.take((3, 2), np.uint16)
    assert (del_me.dtype, tuple(del_me.shape)) == (torch.uint16, (3, 2))
    del del_me
    assert pool.take((6,)).numel() == 6
    assert counts(pool) == (2, 0, 18)
    assert pool.take((12,)).dtype == torch.uint8  # twelve bytes again, whatever they were
    assert counts(pool) == (2, 1, 18)


def test_idle_memory_is_bounded_and_freed() -> None:
    pool = BufferPool(keep=2)
    held = [pool.take((8,)) for _ in range(5)]
    held.clear()
    assert counts(pool) == (5, 0, 16)
    late = pool.take((8,))
    pool.close()
    assert counts(pool)[2] == 0
    del late  # its memory goes with it
    assert counts(pool)[2] == 0


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool(keep=4)
    clashes = []

    def work(mark: int) -> None:
        for _ in range(300):
            tensor = pool.take((64,))
            tensor.fill_(mark)
            if not bool((tensor == mark).all()):
                clashes.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert counts(pool)[0] <= 8
