"""A fleet in one thread: complete engines, a simulated network, virtual time, one seed (docs/testing.md)."""
