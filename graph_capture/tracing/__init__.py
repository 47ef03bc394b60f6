"""From a module and a batch to a traced step, with nothing of the user's changed."""
