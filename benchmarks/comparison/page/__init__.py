"""What docs/benchmarks.md says of the comparison."""
