"""What copies to the host are worth beside recomputation, by solver, budget and link."""
