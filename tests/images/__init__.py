"""The images of `make images`: what is in them, and a fleet of them by the compose file, under a Docker of its own."""
