"""Costs of ops and of whole steps, and where they are kept."""
