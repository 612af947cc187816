"""Adapters for kinds of engines behind one seam, and their HTTP streams."""
