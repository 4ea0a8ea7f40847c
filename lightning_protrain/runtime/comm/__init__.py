"""Communication between ranks: collectives, shared host memory, and the order of writes to it."""
