"""The runtime of one agent of a job: init and shutdown, fleets of threads, rank and size, and the end of its script."""
