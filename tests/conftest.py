"""Fixtures that test files of several rooms share."""

from __future__ import annotations

pytest_plugins = ["tests.support.graph"]
