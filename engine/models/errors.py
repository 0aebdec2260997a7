"""The one error of loading a model: a weight file that can't be read, or that doesn't hold what the model needs."""

from __future__ import annotations


class WeightsError(ValueError):
    """Weights that are missing, corrupt, truncated or of an unsupported type. The message names file and tensor."""
