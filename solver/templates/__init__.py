"""Rules by hand: what forward keeps; backward makes the rest again."""
