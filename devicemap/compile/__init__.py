"""A function of the user's -> one traced function, on each device."""
