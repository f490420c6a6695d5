"""Users and items: ratings, choices, and lists of items for each user."""
