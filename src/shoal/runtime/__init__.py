"""One agent of a job: init and shutdown, fleets of threads, rank and size, and how its script ended."""
