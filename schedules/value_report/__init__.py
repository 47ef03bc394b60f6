"""What becomes of each value, folded and grouped; who holds the peak."""
