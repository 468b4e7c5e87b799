"""From the bytes of Gym's answers to a group's tensors; see the README in this folder."""
