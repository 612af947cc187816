"""What operators see: the status report, and the views of the command line."""
