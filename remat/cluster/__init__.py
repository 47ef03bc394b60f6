"""One plan for a cluster, from a factory to a file and a screen."""
