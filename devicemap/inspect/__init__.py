"""What will run, what ran, and whether it is right."""
