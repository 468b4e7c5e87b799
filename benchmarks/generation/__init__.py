"""What the server in front of a generator costs, and what the two roads of training tokens cost."""
