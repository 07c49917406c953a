"""What runs on an agent's control thread, and the directory: links, routes to producers, control sockets.

The state machines that this thread runs are in ``kvxfer.protocol``; what moves bytes is in ``kvxfer.data``.
"""
