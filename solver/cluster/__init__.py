"""One plan for a cluster: mesh, states, stage borders and recomputation together. No torch."""
