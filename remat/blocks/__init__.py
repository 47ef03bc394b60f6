"""Planning block by block, each distinct one once."""
