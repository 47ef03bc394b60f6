"""From a joint fx graph to ops and values: aliases, places in the source, ops of our own."""
