"""The networks that the benchmark graphs are captured from, and the stated prices of their ops."""
