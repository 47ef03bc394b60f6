"""What betters a schedule: repair, exchange, neighbourhoods."""
