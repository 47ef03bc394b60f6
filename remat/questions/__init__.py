"""Questions about a plan, and their answers."""
