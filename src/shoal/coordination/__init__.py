"""One order of operations on all agents, for collective backends: requests, response cache, decisions."""
