"""One short file for each framework: what switches it to this attention. `trees` serves all: batches as trees."""
