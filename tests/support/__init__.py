"""Code that several test packages share, such as the simulated device and ranks in processes."""
