"""What a run would have been with something changed: changes, predictions with intervals, and the score of them."""
