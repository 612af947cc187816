"""The fleet's decisions: its engines, their intakes and versions, and the sessions that need them."""
