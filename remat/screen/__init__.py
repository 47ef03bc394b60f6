"""What is shown to the person who waits, on any terminal."""
