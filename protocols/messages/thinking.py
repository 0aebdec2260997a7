"""The marker that signs a thinking block, and its check when the block comes back.

A marker is `flare-thinking-v1:` and the SHA-256 of the block's visible text, so it is deterministic and needs no key or
state. It shows that a replayed block is unchanged; it authenticates nobody.
"""

from __future__ import annotations

import hashlib

from protocols.fields import refuse

PREFIX = "flare-thinking-v1:"
_DAMAGED = 32  # a suffix at least this long is a marker that was changed; a shorter one was never made by Flare


def marker(text: str) -> str:
    """The signature of a thinking block with this visible text."""
    return PREFIX + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check(text: str, signature: str | None, field: str) -> None:
    """Refuses a local marker that doesn't belong to `text`.

    Signatures of other providers, and strings that only begin like a marker, are foreign: their readable text is
    replayed as it is. Raises InvalidRequest naming `field`.
    """
    if signature is None or not signature.startswith(PREFIX):
        return
    if len(signature) - len(PREFIX) >= _DAMAGED and signature != marker(text):
        raise refuse(field, "this flare-thinking-v1 signature is not of this text; replay thinking blocks unchanged")
