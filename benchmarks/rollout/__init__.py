"""What rollouts cost beside the work they cannot do without."""
