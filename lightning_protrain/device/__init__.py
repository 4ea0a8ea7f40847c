"""Memory, copies and topology of devices: the only package that uses `torch.cuda`."""
