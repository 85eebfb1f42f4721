"""The composition of the parts of one agent, its watchdog, and what it reports about itself."""
