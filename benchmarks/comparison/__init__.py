"""Training steps as people make them fit today, and ours, measured on the same models."""
