"""How the processes of a job find each other: the launcher's variables, the store, and the peer directory."""
