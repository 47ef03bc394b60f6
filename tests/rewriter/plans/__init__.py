"""Plans in files: made, kept, edited, loaded, and for a range of sizes."""
