"""A federation between real machines: the folders of its parties, the server, the clients, how it stands."""
