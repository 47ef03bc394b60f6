"""Other orders of first computations than the captured one."""
