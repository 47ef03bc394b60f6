"""Python's state that forward and the loss read: found, kept, and compared before each step."""
