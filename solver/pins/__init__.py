"""What a user forces: globs over module paths, as a change of graph with the way back."""
