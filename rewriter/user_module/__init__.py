"""The module that the user gets: the model's state around a compiled step."""
