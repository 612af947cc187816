"""What every room uses: clock, counters, tasks that outlive their caller. Imports no other room."""
