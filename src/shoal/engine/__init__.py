"""The engine of one agent: composition of its parts, watchdog, and status reports."""
