"""What the tests share: a reference in plain tensors, sample tensors, and ways to run fleets and to look at them."""

TRANSPORTS = ("threads", "shared_memory", "network")
PROCESS_GROUP = "process-group"
"""The fourth, in which process groups of torch.distributed carry tensors: for the contract suite, tests/ops."""
