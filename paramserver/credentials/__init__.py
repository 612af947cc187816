"""The makers of a fleet's credentials, for its operator: `authority` issues certificates, `fleet` keeps them in a
directory and replaces them step by step, `commands` is `paramserver credentials`. No daemon comes in here."""
