"""What every room uses: clock, counters, shielded and supervised tasks. Imports no other room."""
