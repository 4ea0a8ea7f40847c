"""Conversations: where they come from, how they become batches, which tokens count in the loss."""
