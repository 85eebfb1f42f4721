"""What runs inside an agent: how it was launched, whom it meets, and how its operations make progress."""
