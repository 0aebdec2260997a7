"""Benchmarks: one driver, workloads as data, peers beside us in the same run."""
