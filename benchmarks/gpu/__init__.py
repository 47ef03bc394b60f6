"""What is measured on a GPU that is lent for minutes: `python -m benchmarks.gpu` runs it."""
