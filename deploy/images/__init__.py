"""The images of the daemons: their Containerfile, and `make images`, which builds them without a registry.

What decides what is in an image stands in the Containerfile. This package makes the base image that it starts from, and
gives the build what it has to know of its network. Standard library only: it runs before anything is installed.
"""
