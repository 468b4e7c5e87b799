"""A page over a file of rollouts: ``gymrl view rollouts.jsonl``, or :func:`open_viewer`."""

from gymrl.viewer.server import Viewer, ViewerOptions, new_token, open_viewer

__all__ = ["Viewer", "ViewerOptions", "new_token", "open_viewer"]
