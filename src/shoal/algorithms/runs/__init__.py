"""A run of an algorithm: its loop, gradients and batches, conditions of the network, and its records."""
