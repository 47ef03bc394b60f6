"""Many budgets: sweeps, fronts, and what memory is worth."""
