"""What a rewritten step is compared by."""
