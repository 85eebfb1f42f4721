"""Links between agents: threads, shared memory, TCP; and the messages on them."""
