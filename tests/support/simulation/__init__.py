"""A fleet in one thread: complete engines over a simulated network, in virtual time, from one seed (docs/testing.md)."""
