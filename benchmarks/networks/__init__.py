"""The networks that the benchmark graphs are captured from, and the stated costs of their ops."""
