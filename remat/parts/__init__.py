"""Planning a model that is no one graph: its modules, each run once or again as a whole."""
