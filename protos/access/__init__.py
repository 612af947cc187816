"""Who may use a daemon: roles, API keys and the file that holds them, and where a daemon listens. For every daemon and
client; which role may do what over HTTP is the gateway's (`gateway.core.access`)."""
