"""Plans in files: kept, read, and held against a model."""
