"""What several tests share: the simulated device and ranks."""
