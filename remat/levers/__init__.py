"""What fits a step beside recomputation: updates during backward, and one arena."""
