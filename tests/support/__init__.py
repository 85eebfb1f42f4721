"""What the tests share: a reference in plain tensors, sample tensors, and ways to run fleets and to look at them."""

TRANSPORTS = ("threads", "shared_memory", "network")
