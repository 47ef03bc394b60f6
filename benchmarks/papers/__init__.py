"""Published tables beside plans for the same shapes: `python -m benchmarks.papers`.

`published` has the figures as they were read, each with its source. `networks` writes the models
anew, with weights that nobody reads. `rebuilt` plans them, `tiers` plans whole steps, and `systems`
makes docs/systems.md of the kept results.
"""
