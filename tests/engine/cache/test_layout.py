"""Costs and properties of cache layouts."""

from __future__ import annotations

from engine.cache.layout import CacheLayout, Full, IndexKeys, Latent, Recurrent, Window


def test_page_bytes_of_a_plain_model() -> None:
    """SmolLM2-135M: 30 layers, 3 KV heads of 64, bf16: 23,040 bytes a token."""
    layout = CacheLayout((Full(3, 64),) * 30, 64)
    assert layout.page_bytes(2) == 23_040 * 64
    assert layout.dense and layout.window is None and layout.state_bytes == 0


def test_mixed_layouts() -> None:
    layout = CacheLayout((Full(2, 8), Window(2, 8, 128), Window(2, 8, 512), Recurrent(((4, 8), (2,)))), 16)
    assert not layout.dense
    assert layout.window == 512
    assert layout.page_bytes(2) == 2 * 8 * 2 * 16 * 2
    assert layout.window_page_bytes(2) == 2 * layout.page_bytes(2)
    assert layout.state_bytes == 34 * 4


def test_compressed_layouts_stay_dense() -> None:
    layout = CacheLayout((Latent(512, 64), IndexKeys(1, 128), Full(1, 8, value_dim=4)), 1)
    assert layout.dense
    assert layout.page_bytes(1) == 576 + 128 + 12
