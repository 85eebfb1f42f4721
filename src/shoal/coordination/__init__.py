"""One order of operations on all agents, for engines that need one: what is asked for, remembered, decided."""
