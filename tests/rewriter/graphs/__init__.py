"""The graphs that are emitted: kernels, draws, strides, heads and MLPs in chunks."""
