"""A report of finished runs: read them, group them by settings, lay them out."""
