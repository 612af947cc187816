"""Repack: which sessions move, so that whole engines become free for a newer version."""
