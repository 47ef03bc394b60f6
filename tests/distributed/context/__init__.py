"""Context parallel ranks: plans applied, and what cannot be."""
