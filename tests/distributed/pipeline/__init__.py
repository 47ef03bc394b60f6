"""A cluster's plan on ranks that are stages of a pipeline."""
