"""What is proved: least times and least peaks of any schedule."""
