"""Steps of two ranks, measured many times."""
