"""The job behind the verbs: load a factory, capture, price, solve, rewrite, check."""
