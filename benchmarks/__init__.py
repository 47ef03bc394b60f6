"""Benchmarks: graphs, instance files, and what each solver makes of them."""
