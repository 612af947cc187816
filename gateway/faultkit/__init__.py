"""The scripted engine, and the command that serves some of them with failures drawn by seed."""
