"""Proof of the job's secret, seals of messages, and TLS."""
