"""Tests of `benchmarks/gpu`, without one."""
