"""What the guards of a rewritten module see."""
