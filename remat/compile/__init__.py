"""Plans for code by Inductor: the backend of `torch.compile`, and `compile=True`."""
