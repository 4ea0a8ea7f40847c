"""Training on several ranks: launch, synchronisation, common settings and common failures."""
