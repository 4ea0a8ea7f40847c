"""Allocates memory and copies bytes: the only package that names `torch.cuda`."""
