"""Published training times beside those that devices of the table are predicted to take."""
