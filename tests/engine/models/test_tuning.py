"""Which kernel serves how many rows: the decision from given times, and a measurement that gives one."""

from __future__ import annotations

import torch

from engine.models import tuning
from engine.models.layers import Precision
from engine.models.tuning import tuned

BF16, FP32 = torch.bfloat16, torch.float32
INT4 = {1: 0.8, 2: 0.9, 4: 1.3, 8: 2.7, 16: 5.2, 32: 10.4, 64: 20.5}
DENSE = {1: 2.2, 2: 1.9, 4: 1.9, 8: 2.4, 16: 3.4, 32: 5.5, 64: 9.7}
HALF = {1: 1.2, 2: 1.1, 4: 1.4, 8: 2.3, 16: 4.4, 32: 8.5, 64: 16.6}
CONFIG = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512}


def precision(*, invariant: bool) -> Precision:
    return Precision(torch.device("cpu"), BF16, quantized=True, invariant=invariant)


def test_a_dense_copy_serves_the_rows_from_which_it_is_faster_for_good() -> None:
    chosen = tuning._many({None: INT4, FP32: DENSE, BF16: HALF}, 1)
    assert (chosen.rows, chosen.dtype) == (8, FP32)


def test_no_copy_is_faster_than_memory_gives_it() -> None:
    """Measured from the cache, the copy wins at 8 rows; read from memory, which takes 3.8, only from 16 on."""
    bounded = {None: INT4, FP32: tuning._bounded(DENSE, 3.8), BF16: tuning._bounded(HALF, 1.9)}
    chosen = tuning._many(bounded, 1)
    assert (chosen.rows, chosen.dtype) == (16, FP32)
    assert tuning._many(bounded, 2).rows == 4, "two halves cost twice, so the copy pays sooner"


def test_a_copy_that_never_pays_is_never_used() -> None:
    slow = {rows: 100.0 for rows in INT4}
    assert tuning._many({None: INT4, FP32: slow, BF16: slow}, 1).rows > max(INT4)


def test_invariant_kernels_are_not_timed() -> None:
    small, large = (tuned(precision(invariant=True), CONFIG, cache) for cache in (0, 1 << 30))
    assert (small.many, small.dense_head) == (None, False)
    assert (large.many, large.dense_head) == (None, True)


def test_fast_kernels_are_measured() -> None:
    found = tuned(precision(invariant=False), CONFIG, 0)
    assert found.many is not None and found.many_head is not None
    assert 1 <= found.many.rows <= 2 * max(INT4)
    assert found.many_head.dtype == BF16
