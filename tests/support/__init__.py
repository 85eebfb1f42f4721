"""Shared parts of the tests: a reference in plain tensors, sample tensors, and ways to run and inspect fleets."""

TRANSPORTS = ("threads", "shared_memory", "network")
PROCESS_GROUP = "process-group"
"""The fourth, in which process groups of torch.distributed carry tensors: for the contract suite, tests/ops."""
