"""A file of the user that has a model: which of its names are meant."""
