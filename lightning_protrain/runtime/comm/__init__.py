"""Connects ranks: collectives, host memory that they share, and the order of their writes."""
