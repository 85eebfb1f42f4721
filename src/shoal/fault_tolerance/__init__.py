"""Which agents take part: failures, the agreement of the survivors, recovery, rejoin and partitions."""
