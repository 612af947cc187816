"""One relay: its lease, holdings and elections; its models' versions, and what fetches, shows and drops them."""
