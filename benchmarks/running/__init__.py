"""What a rewritten step takes beside its ops."""
