"""Fault tolerance and elastic membership: failures, the agreement of the survivors, recovery, rejoin and partitions."""
