"""Plans, reports, progress and verification of calls."""
