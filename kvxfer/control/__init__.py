"""The agent and all that its control thread does: links, directories, routes, sockets."""
