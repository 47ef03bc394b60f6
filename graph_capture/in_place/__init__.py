"""Which ops of a joint graph write in place, as eager's do."""
