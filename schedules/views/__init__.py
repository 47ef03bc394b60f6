"""Forms that pictures read: runs, bands, ribbons, colours."""
