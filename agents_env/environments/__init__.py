"""The environments that come with the package. Another is a class with the same two methods; see `environment.py`."""
