"""The version, read by the build and by `gymrl --version`."""

__version__ = "0.1.0"
