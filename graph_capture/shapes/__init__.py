"""One trace for a range of sizes: sizes as symbols, and what follows for any size of the range."""
