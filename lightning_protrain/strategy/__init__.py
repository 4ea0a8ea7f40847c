"""Lightning's strategy: profile, search, place and run."""
