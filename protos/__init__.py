"""What travels between Laminar's processes: messages, error vocabulary, and daemon conventions."""
