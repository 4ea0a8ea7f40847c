"""Where bytes live and how they move: the only package that names `torch.cuda`."""
