"""The report: one HTML page of a plan."""
