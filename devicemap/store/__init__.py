"""Results on disk: a SQLite database of chunks with checksums, runs that continue, and exports."""
