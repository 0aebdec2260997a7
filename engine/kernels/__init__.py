"""Kernels of our own, where the libraries' are not fast enough. Each has a plain twin in the tests."""
