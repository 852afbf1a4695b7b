"""What a call will do, told before it runs: where rows go, what travels, what waits, and what to change."""
