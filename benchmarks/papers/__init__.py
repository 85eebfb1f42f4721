"""What papers report, beside what Shoal's network model says of it, and the tables of costs that they print."""
