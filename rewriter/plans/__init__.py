"""Plans in files: kept, read, and compared with a model."""
