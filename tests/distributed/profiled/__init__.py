"""Steps of ranks that are measured by the profiler."""
