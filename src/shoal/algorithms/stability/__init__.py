"""Whether differences between agents decay under an algorithm on a topology, or grow."""
