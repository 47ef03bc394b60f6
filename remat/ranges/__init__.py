"""Plans for a range of sizes: the calls, the curve of overheads, and caches that learn ranges."""
