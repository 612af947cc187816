"""Scripted engines that fail by seed."""
