"""Values that the client, the receiver, the API and durable tasks have in common. Pure."""
