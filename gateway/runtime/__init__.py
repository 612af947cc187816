"""What every room uses: clock, counters, the loop's rounds, shielded and supervised tasks. Imports no other room."""
