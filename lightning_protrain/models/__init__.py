"""Language models of transformers: building, loading, adapters, loss, metrics and export."""
