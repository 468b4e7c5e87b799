"""How soon a large file of rollouts can be looked at."""
