"""A model's part on one rank of a pipeline, and the stage of torch's that runs it."""
