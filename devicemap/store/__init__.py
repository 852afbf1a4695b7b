"""Results on disk: chunks with checksums, a journal of what is done, and reading both back."""
