"""A device that exists only in tests."""
