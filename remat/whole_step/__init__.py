"""The whole optimizer step over device, host and NVMe: its graph, its plan, and what runs it."""
