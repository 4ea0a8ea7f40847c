"""Chats: which of their tokens are trained, for any chat template."""
