"""Scores that order the rows of each group, such as the documents of a query."""
