"""What the ranks of a node share: collectives, host memory, and who writes when."""
