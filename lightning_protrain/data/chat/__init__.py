"""Which tokens of a chat are trained, whatever its template."""
