"""What is measured on a CUDA device beside tests: `benchmarks/gpu_run.sh` runs all of it."""
