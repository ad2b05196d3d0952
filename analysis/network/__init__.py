"""Parallelism modes on a network with limited links: namespaces and rate-limited links on one machine."""
