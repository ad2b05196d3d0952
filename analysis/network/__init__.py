"""Parallelism modes on a network that is really limited: namespaces and rate-limited links on one machine."""
