"""Cache specs as data: what each layer keeps for past positions, and what a page of all layers costs.

Models declare their layers with these; the rank sizes its pool by them and the prefix index learns from them whether
every page end can be restored. Holds no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Full:
    """Keys and values of every position. `value_dim` None: as `head_dim`."""

    kv_heads: int
    head_dim: int
    value_dim: int | None = None

    @property
    def token_elements(self) -> int:
        return self.kv_heads * (self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim))


@dataclass(frozen=True, slots=True)
class Window:
    """Keys and values of the last `window` positions, kept in pages that are given back as the window moves on."""

    kv_heads: int
    head_dim: int
    window: int

    @property
    def token_elements(self) -> int:
        return self.kv_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class Latent:
    """One compressed vector of every position, shared by all heads (MLA): `rank` elements plus the rotary part."""

    rank: int
    rope_dim: int

    @property
    def token_elements(self) -> int:
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Keys of a sparse-attention indexer, beside the layer's own cache."""

    heads: int
    head_dim: int

    @property
    def token_elements(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state of fixed size a request, whatever its length: the shapes of its tensors and the bytes of an element."""

    shapes: tuple[tuple[int, ...], ...]
    element_bytes: int = 4

    @property
    def state_bytes(self) -> int:
        return sum(prod(shape) for shape in self.shapes) * self.element_bytes


LayerCache = Full | Window | Latent | IndexKeys | Recurrent


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All layers of one rank, in order. A layer may appear with several specs (a latent cache and its index keys)."""

    layers: tuple[LayerCache, ...]
    page_tokens: int

    @property
    def dense(self) -> bool:
        """Every page end is restorable from pages alone: no layer keeps a state or drops pages."""
        return not any(isinstance(layer, Recurrent | Window) for layer in self.layers)

    @property
    def window(self) -> int | None:
        """The widest window, which a checkpoint must cover with window pages; None without one."""
        return max((layer.window for layer in self.layers if isinstance(layer, Window)), default=None)

    def page_bytes(self, element_bytes: int) -> int:
        """Bytes of one page over the layers that keep every position."""
        kept = sum(layer.token_elements for layer in self.layers if not isinstance(layer, Window | Recurrent))
        return kept * self.page_tokens * element_bytes

    def window_page_bytes(self, element_bytes: int) -> int:
        """Bytes of one page over the window layers, which come from a pool of their own."""
        kept = sum(layer.token_elements for layer in self.layers if isinstance(layer, Window))
        return kept * self.page_tokens * element_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one state snapshot over the recurrent layers."""
        return sum(layer.state_bytes for layer in self.layers if isinstance(layer, Recurrent))
