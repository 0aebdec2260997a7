"""Keys name content: equal exactly when everything that makes KV is equal."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.keys import KEY_BYTES, cache_seed, image_part, next_key, page_keys
from engine.config import Manifest
from engine.types.request import ImageSpan

SEED = b"seed"
MANIFEST = Manifest("m", "llama", "safetensors", {}, [], 64, 10, None, [0], {}, "digest")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 9), max_size=40))
def test_keys_agree_exactly_as_far_as_pages_do(one: list[int], two: list[int]) -> None:
    keys_one, keys_two = page_keys(one, 4, SEED), page_keys(two, 4, SEED)
    assert len(keys_one) == len(one) // 4
    for page, (a, b) in enumerate(zip(keys_one, keys_two, strict=False)):
        assert (a == b) == (one[: 4 * page + 4] == two[: 4 * page + 4])


def test_a_chain_can_be_continued_page_by_page() -> None:
    ids = np.arange(12, dtype=np.int32)
    parent = SEED
    for page, key in enumerate(page_keys(ids, 4, SEED)):
        parent = next_key(parent, ids[4 * page : 4 * page + 4].tobytes())
        assert parent == key
        assert len(key) == KEY_BYTES >= 16


def test_types_of_ids_do_not_matter() -> None:
    assert page_keys([1, 2, 3, 4], 2, SEED) == page_keys(np.array([1, 2, 3, 4], dtype=np.int64), 2, SEED)


def test_images_are_part_of_the_pages_they_reach_and_all_later() -> None:
    ids = [7] * 16
    image, other = ImageSpan(5, 4, b"a" * 32), ImageSpan(5, 4, b"b" * 32)
    plain, one, two = page_keys(ids, 4, SEED), page_keys(ids, 4, SEED, [image]), page_keys(ids, 4, SEED, [other])
    moved = page_keys(ids, 4, SEED, [ImageSpan(6, 4, b"a" * 32)])
    assert plain[0] == one[0] == two[0] == moved[0]
    for page in (1, 2, 3):
        assert len({plain[page], one[page], two[page], moved[page]}) == 4


def test_image_parts_are_unambiguous() -> None:
    span = ImageSpan(2, 6, b"d" * 32)
    assert image_part(8, 12, [span]) == b""
    assert image_part(0, 2, [span]) == b""
    assert image_part(4, 8, [span]) != image_part(0, 4, [span])


def test_the_seed_covers_model_numerics_and_geometry() -> None:
    def seed(manifest: Manifest = MANIFEST, dtype: str = "bfloat16", numerics: str = "fast", page: int = 64) -> bytes:
        return cache_seed(manifest, dtype=dtype, numerics=numerics, page_tokens=page)

    other = Manifest("m", "llama", "safetensors", {}, [], 64, 10, None, [0], {}, "other digest")
    recipe = Manifest("m", "qwen3", "safetensors", {}, [], 64, 10, None, [0], {}, "digest")
    seeds = {seed(), seed(other), seed(recipe), seed(dtype="float32"), seed(numerics="invariant"), seed(page=16)}
    assert len(seeds) == 6
    assert seed() == seed()


def test_the_seed_covers_what_computes() -> None:
    def seed(*computation: str) -> bytes:
        return cache_seed(MANIFEST, dtype="auto", numerics="fast", page_tokens=64, computation=computation)

    seeds = {seed(), seed("cpu"), seed("cpu", "int8"), seed("cpuint8"), seed("int8", "cpu")}
    assert len(seeds) == 5
    assert seed() == cache_seed(MANIFEST, dtype="auto", numerics="fast", page_tokens=64)
