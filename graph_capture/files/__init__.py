"""Files: read whole and within limits, decoded or refused in one line, and replaced at once."""
