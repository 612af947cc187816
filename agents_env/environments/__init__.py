"""The environments that come with the package; each implements the protocol of `environment.py`."""
