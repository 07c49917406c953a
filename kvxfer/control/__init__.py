"""The agent and its control thread (links, routes to producers, control sockets), and the directory.

The state machines that the control thread drives are in ``kvxfer.protocol``; what moves bytes is in ``kvxfer.data``.
"""
