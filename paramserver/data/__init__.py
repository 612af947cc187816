"""Moving bytes: the data port, fetches, the transports TCP and NIXL, copying and digesting in C."""
