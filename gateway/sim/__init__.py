"""A fleet of simulated engines under the gateway's own decisions, in virtual time."""
