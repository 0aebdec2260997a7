"""Page keys: hash-chained names of full pages of KV.

A page's key covers the model and its numerics (the seed), every token before the page's end, and every image that
reaches into it, so equal keys mean equal KV. Router and preprocessor compute them from the settings alone; an engine,
whose KV may travel, names its pages by what computes it as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.config import Manifest
from engine.types.request import ImageSpan

KEY_BYTES = 24
"""192 bits: finding two prompts with one key takes 2**96 tries."""

_FORMAT = b"flare-page-key-1"


def cache_seed(
    manifest: Manifest,
    *,
    dtype: str,
    numerics: str,
    page_tokens: int,
    kv_dtype: str = "",
    computation: Sequence[str] = (),
) -> bytes:
    """The start of every chain of one model as it is run. KV of another dtype, numerics mode or page geometry is
    different KV, so it gets different keys. `dtype` and `numerics` are the choices in force or as configured, as long
    as all who must agree use the same. `computation`: what else tells KV apart, such as device, kernels and ranks."""
    parts = (manifest.digest, manifest.recipe, dtype, numerics, str(page_tokens), kv_dtype, *computation)
    digest = hashlib.blake2b(_FORMAT, digest_size=KEY_BYTES)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def next_key(parent: bytes, tokens: bytes, images: bytes = b"") -> bytes:
    """The key of the page after `parent` (the seed for the first page). `tokens`: the page's ids as little-endian
    int32; `images`: what `image_part` gives for it."""
    return hashlib.blake2b(parent + images + tokens, digest_size=KEY_BYTES, person=_FORMAT).digest()


def image_part(start: int, end: int, images: Sequence[ImageSpan]) -> bytes:
    """What images contribute to the page of positions [start, end): each digest with where the image lies relative
    to the page. Empty without images."""
    part = b""
    for span in images:
        if span.start < end and start < span.start + span.length:
            part += (span.start - start).to_bytes(8, "little", signed=True)
            part += span.length.to_bytes(8, "little") + span.digest
    return len(part).to_bytes(4, "little") + part if part else b""


def page_keys(
    ids: NDArray[np.int32] | Sequence[int], page_tokens: int, seed: bytes, images: Sequence[ImageSpan] = ()
) -> tuple[bytes, ...]:
    """Keys of the full pages of `ids`, in order; a last partial page has none."""
    array = np.ascontiguousarray(ids, dtype="<i4")
    data = memoryview(array.tobytes())
    keys = []
    parent = seed
    for start in range(0, len(array) - page_tokens + 1, page_tokens):
        end = start + page_tokens
        part = image_part(start, end, images) if images else b""
        parent = next_key(parent, data[4 * start : 4 * end].tobytes(), part)
        keys.append(parent)
    return tuple(keys)
