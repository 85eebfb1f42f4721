"""One-sided windows: memory that an agent's neighbours write to and read from without its taking part."""
