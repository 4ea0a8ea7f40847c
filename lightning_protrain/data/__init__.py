"""Loads conversations, makes batches of them, and decides which tokens are in the loss."""
