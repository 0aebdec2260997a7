"""Kernels of our own, where the libraries' are not fast enough. Each has a plain twin in the tests."""

INT8_GROUPS = (16, 32)
"""Inputs under one scale, as `int8` knows them. Here, since importing that compiles it."""
