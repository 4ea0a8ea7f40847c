"""Makes plans from profiles and budgets. Imports no torch."""
