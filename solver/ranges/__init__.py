"""Plans for a range of sizes: a few schedules of one trace, each for a part of the range."""
