"""Fixtures that test files of several rooms share."""

from __future__ import annotations

import os

# Before anything loads torch: threads that spin for each other starve a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

pytest_plugins = ["tests.support.graph"]
