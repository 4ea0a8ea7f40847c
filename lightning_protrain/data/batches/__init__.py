"""Conversations become token ids, packed rows and batches of tensors."""
