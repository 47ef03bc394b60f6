"""One whole optimizer step as a graph: microbatches through layers, then an update of each."""
