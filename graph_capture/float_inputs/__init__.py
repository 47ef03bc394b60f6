"""Numbers of Python's that each step reads anew."""
