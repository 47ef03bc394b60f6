"""What of a step concerns other ranks: collectives and what they take, and DTensors."""
