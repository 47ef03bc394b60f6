"""A model as a chain of blocks, and the graph of one rank of it."""
