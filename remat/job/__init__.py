"""The job behind the verbs: load a factory, capture, time, solve, rewrite, check."""
