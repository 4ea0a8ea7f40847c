"""Decides: from records to a Plan. Imports no torch."""
