"""What models of others do beside computing."""
