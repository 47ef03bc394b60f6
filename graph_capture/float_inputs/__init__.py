"""Numbers of Python's that are inputs of the step: found, followed, and read at each step."""
