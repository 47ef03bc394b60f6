"""Steps whose kernels are Inductor's."""
