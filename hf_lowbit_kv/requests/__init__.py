"""Many requests on one model: a pool of rows with packed pages, and `generate_many` on it."""
