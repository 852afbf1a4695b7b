"""What a traced function takes: which ops run, what they make, and what is alive at once."""
